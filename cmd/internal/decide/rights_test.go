package decide

import (
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/test/kubetest"
)

const (
	approved = v1alpha1.VerdictApproved
	rejected = v1alpha1.VerdictRejected
)

func TestWhoLacksARightLearnsWhichAndWhatToTry(t *testing.T) {
	w := newWorld(t)
	alice, bob, carol := w.people(t)
	w.grant(t, w.ns, "dave", maySee)
	w.grant(t, w.ns, "erin", maySee, mayApprove)
	dave, erin, nobody := w.kubeconfig(t, "dave"), w.kubeconfig(t, "erin"), w.kubeconfig(t, "nobody")
	canPatch := "kubectl auth can-i patch joinrequests." + group + " -n " + w.ns
	canApprove := func(pool string) string {
		return "kubectl auth can-i approve fleetpools." + group + "/" + pool + " -n " + w.ns
	}
	for name, tc := range map[string]struct {
		user, pool string
		args       []string
		code       int
		says       []string
		silent     []string
	}{
		"alice into any pool":            {user: alice, pool: "cpu", says: []string{"approved"}},
		"carol into her pool":            {user: carol, pool: "gpu", says: []string{"approved"}},
		"carol into another":             {user: carol, pool: "cpu", code: ExitForbidden, says: []string{"You lack approve on fleetpools/cpu in namespace " + w.ns, canApprove("cpu")}, silent: []string{canPatch}},
		"carol out of another into her":  {user: carol, pool: "cpu", args: []string{"--pool=gpu"}, code: ExitForbidden, says: []string{canApprove("cpu")}, silent: []string{canApprove("gpu")}},
		"carol out of hers into another": {user: carol, pool: "gpu", args: []string{"--pool=cpu"}, code: ExitForbidden, says: []string{canApprove("cpu")}, silent: []string{canApprove("gpu")}},
		"bob":                            {user: bob, pool: "gpu", code: ExitForbidden, says: []string{"bob", "You lack approve on fleetpools/gpu", canApprove("gpu")}, silent: []string{canPatch}},
		"bob, not for real":              {user: bob, pool: "gpu", args: []string{"--dry-run=server"}, code: ExitForbidden, says: []string{canApprove("gpu")}},
		"dave, who only sees":            {user: dave, pool: "gpu", code: ExitForbidden, says: []string{"patch on joinrequests in namespace " + w.ns + ", and approve on fleetpools/gpu", canPatch, canApprove("gpu")}},
		"erin, without patch":            {user: erin, pool: "gpu", code: ExitForbidden, says: []string{canPatch}, silent: []string{canApprove("gpu")}},
		"nobody":                         {user: nobody, pool: "gpu", code: ExitForbidden, says: []string{"kubectl auth can-i get joinrequests." + group + " -n " + w.ns}},
	} {
		for _, verdict := range []v1alpha1.Verdict{approved, rejected} {
			if verdict == rejected && (len(tc.args) > 0 || tc.code == ExitDone) {
				continue
			}
			t.Run(name+" "+string(verdict), func(t *testing.T) {
				jr := w.ask(t, tc.pool)
				res := w.run(t, tc.user, verdict, append([]string{"jr", jr.Name, "--yes"}, tc.args...)...)
				res.want(t, tc.code, tc.says...)
				for _, s := range tc.silent {
					if contains(lackOf(res.err), s) {
						t.Errorf("says %q, which the user may: %s", s, res.err)
					}
				}
				if tc.code != ExitDone {
					w.wantVerdict(t, jr, "", "")
				}
			})
		}
	}
	w.run(t, nobody, approved, "jr", "--all", "--yes").want(t, ExitForbidden, "kubectl auth can-i list joinrequests."+group+" -n "+w.ns)
}

// What is to be tried asks as the same user, or it answers something else.
func TestWhatToTryKeepsTheFlagsThatSayWhoAsks(t *testing.T) {
	w := newWorld(t)
	w.people(t)
	admin := kubetest.Kubeconfig(t, w.Admin())
	jr := w.ask(t, "gpu")
	w.run(t, admin, approved, "jr", jr.Name, "--yes", "--as=bob", "--as-group=it's").
		want(t, ExitForbidden, "/gpu -n "+w.ns+" --kubeconfig="+admin+` --as=bob --as-group='it'\''s'`)
	w.run(t, admin, approved, "jr", jr.Name, "--yes", "--as=alice").want(t, ExitDone)
	w.wantVerdict(t, jr, approved, "alice")
}

func TestARequestWithoutAPoolNeedsOne(t *testing.T) {
	w := newWorld(t)
	alice, _, carol := w.people(t)
	jr := w.ask(t, "")
	w.run(t, alice, approved, "jr", jr.Name, "--yes").want(t, ExitUsage, "--pool")
	w.run(t, carol, rejected, "jr", jr.Name, "--yes").want(t, ExitForbidden, "kubectl auth can-i approve fleetpools."+group+" -n "+w.ns)
	w.run(t, carol, approved, "jr", jr.Name, "--yes", "--pool=gpu").want(t, ExitDone)
	w.wantVerdict(t, jr, approved, "carol")
	if got := w.read(t, jr).Spec.Decision.Pool; got != "gpu" {
		t.Errorf("into pool %q", got)
	}
}

func TestAnUnassignedMachineIsClaimedForATenant(t *testing.T) {
	w := newWorld(t)
	tenant := w.ns
	approve := []rbacv1.PolicyRule{mayEdit, mayApproveGPU}
	w.grant(t, root, "here", approve...)
	w.grant(t, root, "both", approve...)
	w.grant(t, tenant, "both", approve...)
	atRoot := &world{Cluster: w.Cluster, ns: root, service: w.service, manager: w.manager}
	here, both := w.kubeconfig(t, "here"), w.kubeconfig(t, "both")
	jr := atRoot.ask(t, "")
	claim := []string{"jr", jr.Name, "--yes", "--pool=gpu", "--tenant=" + tenant}
	atRoot.run(t, here, approved, claim...).want(t, ExitForbidden, "kubectl auth can-i approve fleetpools."+group+"/gpu -n "+tenant)
	atRoot.run(t, both, approved, claim[:4]...).want(t, ExitForbidden, "--tenant")
	atRoot.run(t, both, approved, claim...).want(t, ExitDone)
	if d := w.read(t, jr).Spec.Decision; d.Tenant != tenant || d.Pool != "gpu" {
		t.Errorf("decided %+v", d)
	}
	atRoot.run(t, both, approved, "jr", jr.Name, "--yes", "--pool=gpu", "--tenant=other").want(t, ExitConflict, "both", tenant)
	own := w.ask(t, "gpu")
	w.run(t, both, approved, "jr", own.Name, "--yes", "--tenant="+tenant).want(t, ExitForbidden, root)
	w.wantVerdict(t, own, "", "")
}
