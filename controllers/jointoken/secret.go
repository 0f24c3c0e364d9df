package jointoken

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	text "github.com/better-compute/join-operator/attestors/jointoken"
)

// SecretKey is where a Secret keeps the token's text.
const SecretKey = "token"

var (
	errSecretMissing = errors.New("the Secret does not exist")
	errSecretForeign = errors.New("a Secret of this name exists and is not this JoinToken's")
	errSecretGarbled = errors.New("the Secret holds no token under its key " + SecretKey)
)

// SecretName is the name of the Secret that holds a JoinToken's token.
func SecretName(joinToken string) string {
	const suffix, most = "-token", 253
	if len(joinToken)+len(suffix) <= most {
		return joinToken + suffix
	}
	sum := sha256.Sum256([]byte(joinToken))
	return joinToken[:200] + "-" + hex.EncodeToString(sum[:8]) + suffix
}

// readSecret returns the token that the JoinToken's own Secret holds. Errors
// never carry what it holds.
func readSecret(ctx context.Context, secrets client.Reader, t *v1alpha1.JoinToken) (text.Token, error) {
	var s corev1.Secret
	key := types.NamespacedName{Namespace: t.Namespace, Name: SecretName(t.Name)}
	switch err := secrets.Get(ctx, key, &s); {
	case apierrors.IsNotFound(err):
		return text.Token{}, errSecretMissing
	case err != nil:
		return text.Token{}, fmt.Errorf("get Secret %s: %w", key, err)
	}
	if !metav1.IsControlledBy(&s, t) {
		return text.Token{}, errSecretForeign
	}
	if !s.DeletionTimestamp.IsZero() {
		return text.Token{}, errSecretMissing
	}
	token, err := text.Parse(string(s.Data[SecretKey]))
	if err != nil {
		return text.Token{}, errSecretGarbled
	}
	return token, nil
}

// makeSecret makes the Secret with a new token. It only ever creates: who was
// killed after it finds the same token at the next try.
func makeSecret(ctx context.Context, secrets client.Writer, t *v1alpha1.JoinToken) (text.Token, error) {
	token := text.Generate()
	immutable, controller := true, true
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: t.Namespace, Name: SecretName(t.Name),
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoinToken", Name: t.Name, UID: t.UID, Controller: &controller,
			}},
		},
		Immutable: &immutable,
		Type:      corev1.SecretTypeOpaque,
		Data:      map[string][]byte{SecretKey: []byte(token.Text())},
	}
	if err := secrets.Create(ctx, s); err != nil {
		return text.Token{}, fmt.Errorf("create Secret %s/%s: %w", s.Namespace, s.Name, err)
	}
	return token, nil
}
