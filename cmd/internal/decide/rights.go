package decide

import (
	"context"
	"fmt"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// right is what RBAC may grant: a verb on a resource, on one name or on all.
type right struct{ verb, resource, name, namespace string }

func (r right) String() string {
	what := r.resource
	if r.name != "" {
		what += "/" + r.name
	}
	return fmt.Sprintf("%s on %s in namespace %s", r.verb, what, r.namespace)
}

// canI is the command that asks for it.
func (r right) canI() string {
	what := r.resource + "." + v1alpha1.GroupVersion.Group
	if r.name != "" {
		what += "/" + r.name
	}
	return fmt.Sprintf("kubectl auth can-i %s %s -n %s", r.verb, what, r.namespace)
}

// needs are the rights that a decision takes, as the policy joinrequest-decisions has
// them: the pool that was asked for, the pool that it is approved into, and that pool
// in the tenant that the machine is claimed for.
func (o *options) needs(r *v1alpha1.JoinRequest) []right {
	approve := func(namespace, pool string) right {
		return right{verb: v1alpha1.VerbApprove, resource: "fleetpools", name: pool, namespace: namespace}
	}
	needs := []right{{verb: "patch", resource: "joinrequests", namespace: r.Namespace}}
	if r.Spec.Pool != "" || o.pool == "" {
		needs = append(needs, approve(r.Namespace, r.Spec.Pool))
	}
	into := r.Spec.Pool
	if o.pool != "" && o.pool != r.Spec.Pool {
		into = o.pool
		needs = append(needs, approve(r.Namespace, into))
	}
	if o.tenant != "" && o.tenant != r.Namespace {
		needs = append(needs, approve(o.tenant, into))
	}
	return needs
}

// forbidden adds to the API server's refusal which of the rights are missing and how
// to ask for them. None is, where a policy forbids what the rights would allow.
func (o *options) forbidden(ctx context.Context, err error, needs []right) error {
	var missing, try []string
	for _, n := range needs {
		if o.holds(ctx, n) {
			continue
		}
		missing = append(missing, n.String())
		try = append(try, "  "+n.canI()+o.access())
	}
	if missing == nil {
		return forbiddenError{withFlags(err)}
	}
	return forbiddenError{fmt.Errorf("%w\nYou lack %s. Try:\n%s", err, strings.Join(missing, ", and "), strings.Join(try, "\n"))}
}

// withFlags says by which flags the fields are given that a policy asks for or refuses.
func withFlags(err error) error {
	for _, flag := range []string{"pool", "tenant"} {
		if strings.Contains(err.Error(), "spec.decision."+flag) {
			err = fmt.Errorf("%w (spec.decision.%s is --%[2]s)", err, flag)
		}
	}
	return err
}

// holds asks the API server; where it does not answer, the right counts as missing.
func (o *options) holds(ctx context.Context, r right) bool {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: r.verb, Group: v1alpha1.GroupVersion.Group, Resource: r.resource, Name: r.name, Namespace: r.namespace,
		},
	}}
	return o.client.Create(ctx, review) == nil && review.Status.Allowed
}

// access is the flags that say as whom and where, so that what is to be tried asks the
// same question.
func (o *options) access() string {
	var b strings.Builder
	for _, f := range []struct {
		name  string
		value *string
	}{
		{"kubeconfig", o.flags.KubeConfig}, {"context", o.flags.Context}, {"cluster", o.flags.ClusterName},
		{"user", o.flags.AuthInfoName}, {"as", o.flags.Impersonate},
	} {
		if f.value != nil && *f.value != "" {
			fmt.Fprintf(&b, " --%s=%s", f.name, shellQuoted(*f.value))
		}
	}
	if groups := o.flags.ImpersonateGroup; groups != nil {
		for _, g := range *groups {
			fmt.Fprintf(&b, " --as-group=%s", shellQuoted(g))
		}
	}
	return b.String()
}

func shellQuoted(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("/.:_@%+-", r)
	}
	if !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
