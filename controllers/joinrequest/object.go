package joinrequest

import (
	"bytes"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// attestorTypeLabel lets people select requests by the type of their attestor.
const attestorTypeLabel = "join.better-compute.dev/attestor-type"

// object is the undecided object of a row. It fails where the row does not hash
// to what it says, which nobody but an administrator of the database can bring about.
func object(r *row) (*v1alpha1.JoinRequest, error) {
	var ask v1alpha1.JoinRequestAsk
	if err := json.Unmarshal(r.spec, &ask); err != nil {
		return nil, fmt.Errorf("the row of request %s is no request: %w", r.id, err)
	}
	jr := &v1alpha1.JoinRequest{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: r.namespace, Name: nameOf(r.id),
			Labels: map[string]string{attestorTypeLabel: r.attestorType},
		},
		Spec: v1alpha1.JoinRequestSpec{JoinRequestAsk: ask},
	}
	if !asks(jr, r) {
		return nil, fmt.Errorf("the row of request %s does not hash to its own hash", r.id)
	}
	return jr, nil
}

// asks reports whether an object asks for exactly what its row's machine asked.
func asks(jr *v1alpha1.JoinRequest, r *row) bool {
	hash, err := jr.Spec.Hash()
	return err == nil && bytes.Equal(hash[:], r.specSHA256)
}
