package keys

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/better-compute/join-operator/joinsvc/keyring"
)

// stored is a Secret of keys as it is; secret is nil where there is none yet.
type stored struct {
	kind   Kind
	secret *corev1.Secret
	keys   []keyring.Key
}

// secretStore reads and writes the Secrets of keys, each by its name: the job may
// list none.
type secretStore struct {
	client                 corev1client.SecretsGetter
	keysNamespace, trusted string
}

func (s secretStore) namespace(k Kind) string {
	if k == Bundle {
		return s.trusted
	}
	return s.keysNamespace
}

func (s secretStore) load(ctx context.Context, kind Kind) (*stored, error) {
	namespace, name := s.namespace(kind), kind.secret()
	secret, err := s.client.Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return &stored{kind: kind}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read Secret %s/%s: %w", namespace, name, err)
	}
	out := &stored{kind: kind, secret: secret}
	raw, ok := secret.Data[keyring.Item]
	if !ok {
		return nil, fmt.Errorf("the Secret %s/%s has no item %s: it is not one of this job's; delete it or restore it", namespace, name, keyring.Item)
	}
	file, err := keyring.ParseFile(raw, kind.algorithm())
	if err != nil {
		return nil, fmt.Errorf("the Secret %s/%s: %s %w: restore it", namespace, name, keyring.Item, err)
	}
	out.keys = file.Keys
	return out, nil
}

// save writes keys, unless somebody else wrote since they were read.
func (s secretStore) save(ctx context.Context, st *stored, keys []keyring.Key) error {
	namespace, name := s.namespace(st.kind), st.kind.secret()
	raw, err := (&keyring.File{Keys: keys}).Marshal()
	if err != nil {
		return err
	}
	var written *corev1.Secret
	if st.secret == nil {
		written, err = s.client.Secrets(namespace).Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Type:       corev1.SecretTypeOpaque, Data: map[string][]byte{keyring.Item: raw},
		}, metav1.CreateOptions{})
	} else {
		next := st.secret.DeepCopy()
		next.Data[keyring.Item] = raw
		written, err = s.client.Secrets(namespace).Update(ctx, next, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("write Secret %s/%s: %w", namespace, name, err)
	}
	st.secret, st.keys = written, keys
	return nil
}
