// Package tenancy answers for the other controllers whether a namespace is a
// tenant in force: one that the database knows under this name and this uid.
package tenancy

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// Standing is what a namespace is to the fleet.
type Standing struct {
	// InForce is true where machines may join into the namespace.
	InForce bool
	// Reason and Message say why not, as a condition has them.
	Reason, Message string
	// Terminating is true where the namespace is going or gone.
	Terminating bool
	// Annotations are the namespace's.
	Annotations map[string]string
	// UID is the namespace's, empty where it is gone.
	UID string
}

// Of returns the standing of a namespace. The reader decides how fresh the
// namespace is; the tenant's row is always read from the database.
func Of(ctx context.Context, reader client.Reader, db *pgxpool.Pool, name string) (Standing, error) {
	var ns corev1.Namespace
	switch err := reader.Get(ctx, client.ObjectKey{Name: name}, &ns); {
	case apierrors.IsNotFound(err):
		return Standing{Terminating: true, Reason: v1alpha1.ReasonNotATenant, Message: "namespace " + name + " is gone"}, nil
	case err != nil:
		return Standing{}, fmt.Errorf("get namespace %s: %w", name, err)
	}
	s := Standing{Terminating: !ns.DeletionTimestamp.IsZero(), Annotations: ns.Annotations, UID: string(ns.UID)}
	row, err := readTenant(ctx, db, name)
	if err != nil {
		return Standing{}, err
	}
	switch {
	case s.Terminating:
		s.Reason, s.Message = v1alpha1.ReasonNotATenant, "namespace "+name+" is being deleted"
	case row.state == "blocked", row.state != "" && row.uid != s.UID:
		s.Reason = v1alpha1.ReasonTenantBlocked
		s.Message = fmt.Sprintf("namespace %s was deleted and made again: it stays blocked until the old tenant's nodes are retired and its last certificate ran out", name)
	case row.state != "active":
		s.Reason = v1alpha1.ReasonNotATenant
		s.Message = fmt.Sprintf("namespace %s is not a tenant: a cluster administrator labels it %s=%s", name, v1alpha1.TenantLabel, v1alpha1.TenantLabelValue)
	default:
		s.InForce = true
	}
	return s, nil
}
