package policy

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/hack/controlplane"
	"github.com/better-compute/join-operator/test/kubetest"
)

func TestWhereTheClusterCanItStampsWhoDecided(t *testing.T) {
	w := newWorld(t)
	repository, err := controlplane.RepositoryRoot()
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := os.ReadFile(filepath.Join(repository, "config", "components", "stamp-decisions", "joinrequest-stamp.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	objects, err := controlplane.Decode(manifest)
	if err != nil {
		t.Fatal(err)
	}
	w.Apply(t, objects)
	undecided := w.ask(t, "default", "gpu")
	plain := decision(`{"verdict":"Approved","message":"seen"}`)
	defer func() {
		for _, o := range objects {
			if err := w.Client.Delete(t.Context(), o); err != nil {
				t.Error(err)
			}
		}
		// Other tests must not find it in force.
		kubetest.Eventually(t, "the stamp is gone", func(ctx context.Context) error {
			err := w.Client.Patch(ctx, undecided.DeepCopy(), plain, client.DryRunAll)
			if missing(err) {
				return nil
			}
			return fmt.Errorf("still stamped (%v)", err)
		})
	}()
	ns := w.Namespace(t, tenantLabels)
	bob, _ := w.user(t, ns, "bob", mayEdit)
	w.user(t, ns, "alice", mayEdit, mayApprove)
	alice := kubetest.ClientFor(t, w.As(t, "alice", "ops", "dev"))
	jr := w.ask(t, ns, "gpu")
	kubetest.Eventually(t, "the stamp is in force", func(ctx context.Context) error {
		err := alice.Patch(ctx, jr.DeepCopy(), plain, client.DryRunAll)
		if err != nil && !missing(err) {
			t.Fatal(err)
		}
		return err
	})
	wantForbidden(t, "bob", bob.Patch(t.Context(), jr.DeepCopy(), plain), "approve", "fleetpools/gpu")
	forged := decision(`{"verdict":"Approved","decidedBy":` + identity(t, alice, func(u *v1alpha1.UserInfo) { u.Username = "root" }) + `}`)
	wantForbidden(t, "alice as root", alice.Patch(t.Context(), jr.DeepCopy(), forged), "decidedBy.username")
	if err := alice.Patch(t.Context(), jr, plain); err != nil {
		t.Fatal(err)
	}
	review := &authenticationv1.SelfSubjectReview{}
	if err := alice.Create(t.Context(), review); err != nil {
		t.Fatal(err)
	}
	me, got := review.Status.UserInfo, jr.Spec.Decision.DecidedBy
	if got.Username != me.Username || got.UID != me.UID || !equality.Semantic.DeepEqual(got.Groups, me.Groups) || !sameExtra(got, me) {
		t.Errorf("stamped %+v, want %+v", got, me)
	}
	robot := w.robot(t, ns)
	jr = w.ask(t, ns, "gpu")
	if err := robot.Patch(t.Context(), jr, plain); err != nil {
		t.Fatalf("a service account: %v", err)
	}
	if got := jr.Spec.Decision.DecidedBy; got.Username != "system:serviceaccount:"+ns+":robot" || got.UID == "" {
		t.Errorf("stamped %+v", got)
	}
}

// missing tells the schema's refusal of a decision that nobody stamped.
func missing(err error) bool {
	return apierrors.IsInvalid(err) && strings.Contains(err.Error(), "decidedBy: Required value")
}

func sameExtra(got v1alpha1.UserInfo, want authenticationv1.UserInfo) bool {
	return maps.EqualFunc(got.Extra, want.Extra, func(a v1alpha1.ExtraValue, b authenticationv1.ExtraValue) bool {
		return slices.Equal([]string(a), []string(b))
	}) && len(want.Extra) > 0
}
