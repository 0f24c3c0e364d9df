package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/machine"
)

// waits joins into a pool that requires approval and returns the request's name.
func waits(t *testing.T, target *machine.Target, m *machine.Machine, text string) string {
	t.Helper()
	a, err := target.JoinToken(t.Context(), m, text)
	if err != nil {
		t.Fatal(err)
	}
	if a.Outcome != wire.OutcomePending || a.RetryAfterSeconds < 1 || len(a.Certificates) != 0 {
		t.Fatalf("got %+v, want a pending answer", a)
	}
	return a.JoinRequest
}

func request(t *testing.T, ns, name string) *v1alpha1.JoinRequest {
	t.Helper()
	jr := &v1alpha1.JoinRequest{}
	eventually(t, 15*time.Second, "JoinRequest "+name, func() error {
		return sys.kube.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, jr)
	})
	return jr
}

func condition(obj client.Object, kind string) *metav1.Condition {
	for _, c := range conditions(obj) {
		if c.Type == kind {
			return &c
		}
	}
	return nil
}

// user gives somebody rules in a namespace and returns a kubeconfig for them.
func user(t *testing.T, ns, name string, rules ...rbacv1.PolicyRule) string {
	t.Helper()
	meta := metav1.ObjectMeta{Namespace: ns, Name: name}
	if err := sys.kube.Create(t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: rules}); err != nil {
		t.Fatal(err)
	}
	if err := sys.kube.Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}); err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.LoadFromFile(sys.env["KUBECONFIG"])
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range cfg.AuthInfos {
		u.Impersonate, u.ImpersonateGroups = name, []string{"system:authenticated"}
	}
	cfg.Contexts[cfg.CurrentContext].Namespace = ns
	return writeKubeconfig(t, name, cfg)
}

func writeKubeconfig(t *testing.T, name string, cfg *clientcmdapi.Config) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name+".kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, file); err != nil {
		t.Fatal(err)
	}
	return file
}

var (
	seeRequests = rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"joinrequests"}, Verbs: []string{"get", "list", "watch", "patch", "update"}}
	approvePool = func(pools ...string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"fleetpools"}, ResourceNames: pools, Verbs: []string{v1alpha1.VerbApprove}}
	}
)

// kubectl runs kubectl, and so the plugins, as the user of a kubeconfig.
func kubectl(kubeconfig string, args ...string) (string, error) {
	cmd := exec.Command("kubectl", args...)
	cmd.Env = sys.environ("KUBECONFIG=" + kubeconfig)
	if path, err := lookPath("kubectl"); err == nil {
		cmd.Path = path
		cmd.Err = nil
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// lookPath finds a program on the PATH of .dev/env.
func lookPath(name string) (string, error) {
	for _, dir := range filepath.SplitList(sys.env["PATH"]) {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not on the PATH of .dev/env", name)
}

func TestC01_PersonDecidesWithKubectl(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "gpu", true)
	text := token(t, ns, "gpu", "gpu", 5)
	target := sys.target(t)
	bob := user(t, ns, "bob", seeRequests)
	alice := user(t, ns, "alice", seeRequests, approvePool("gpu"))
	carol := user(t, ns, "carol", seeRequests, approvePool("other"))

	m := newMachine(t)
	name := waits(t, target, m, text)
	jr := request(t, ns, name)
	if jr.Spec.CSRSHA256 != m.CSRSHA256() || jr.Spec.Pool != "gpu" {
		t.Errorf("the request says %+v", jr.Spec.JoinRequestAsk)
	}
	for who, kubeconfig := range map[string]string{"bob": bob, "carol": carol} {
		out, err := kubectl(kubeconfig, "approve", "joinrequest", name, "--yes")
		if err == nil || !strings.Contains(out, "approve") || !strings.Contains(out, "fleetpools") || !strings.Contains(out, "gpu") || !strings.Contains(out, "auth can-i") {
			t.Errorf("%s: err %v, output %q; want a refusal that names verb, pool and what to try", who, err, out)
		}
	}
	if again := waits(t, target, m, text); again != name {
		t.Errorf("the machine's second poll made %s", again)
	}
	out, err := kubectl(alice, "approve", "jr/"+name, "--yes", "--message", "seen in the rack")
	if err != nil {
		t.Fatalf("alice: %v: %s", err, out)
	}
	var a *wire.Answer
	eventually(t, 20*time.Second, "the machine joins", func() error {
		var err error
		if a, err = target.JoinToken(t.Context(), m, text); err != nil {
			return err
		}
		if a.Outcome != wire.OutcomeJoined {
			return fmt.Errorf("outcome %s", a.Outcome)
		}
		return nil
	})
	eventually(t, 15*time.Second, "Joined on the request", func() error {
		jr = request(t, ns, name)
		if c := condition(jr, v1alpha1.ConditionJoined); c == nil || c.Status != metav1.ConditionTrue || jr.Status.NodeRef == nil || jr.Status.NodeRef.Name != a.NodeID {
			return fmt.Errorf("status %+v", jr.Status)
		}
		return nil
	})
	if by := jr.Spec.Decision.DecidedBy.Username; by != "alice" {
		t.Errorf("decided by %q", by)
	}
	if n := count(t, `SELECT count(*) FROM audit_log WHERE tenant = $1 AND action = 'request.approve' AND actor = 'alice'`, ns); n != 1 {
		t.Errorf("%d audit rows of alice's approval", n)
	}
	if out, err := kubectl(alice, "approve", "joinrequest", name, "--yes"); err != nil || !strings.Contains(out, "already") {
		t.Errorf("deciding again the same way: %v: %s", err, out)
	}
	if out, err := kubectl(alice, "reject", "joinrequest", name, "--yes"); err == nil || !strings.Contains(out, "alice") {
		t.Errorf("deciding the other way: %v: %s", err, out)
	}

	rejected := newMachine(t)
	name = waits(t, target, rejected, text)
	request(t, ns, name)
	if out, err := kubectl(alice, "reject", "joinrequest", name, "--yes"); err != nil {
		t.Fatalf("reject: %v: %s", err, out)
	}
	eventually(t, 15*time.Second, "the rejection reaches the machine", func() error {
		a, err := target.JoinToken(t.Context(), rejected, text)
		if err == nil {
			return fmt.Errorf("outcome %s", a.Outcome)
		}
		wantRefused(t, err)
		return nil
	})
}

func TestDeletedUndecidedRequestIsMadeAgain(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "gpu", true)
	text := token(t, ns, "gpu", "gpu", 1)
	target, m := sys.target(t), newMachine(t)
	name := waits(t, target, m, text)
	first := request(t, ns, name)
	if err := sys.kube.Delete(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	eventually(t, 30*time.Second, "the request is made again", func() error {
		var jr v1alpha1.JoinRequest
		if err := sys.kube.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: name}, &jr); err != nil {
			return err
		}
		if jr.UID == first.UID {
			return fmt.Errorf("it is the old one still")
		}
		return nil
	})
}

func TestTenantNamespaceGoesWithEverythingInIt(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "general", false)
	pool(t, ns, "gpu", true)
	open, guarded := token(t, ns, "open", "general", 1), token(t, ns, "guarded", "gpu", 1)
	target := sys.target(t)
	a, err := target.JoinToken(t.Context(), newMachine(t), open)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, 15*time.Second, "the node is shown", func() error {
		return sys.kube.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: a.NodeID}, &v1alpha1.FleetNode{})
	})
	waiting := newMachine(t)
	request(t, ns, waits(t, target, waiting, guarded))

	if out, err := kubectl(sys.env["KUBECONFIG"], "delete", "namespace", ns, "--timeout=60s"); err != nil {
		t.Fatalf("delete the namespace: %v: %s", err, out)
	}
	eventually(t, 15*time.Second, "the waiting machine is refused", func() error {
		_, err := target.JoinToken(t.Context(), waiting, guarded)
		if err == nil {
			return fmt.Errorf("it is answered still")
		}
		wantRefused(t, err)
		return nil
	})
	if n := count(t, `SELECT count(*) FROM node_certs WHERE node_id = $1 AND revoked_at IS NOT NULL`, a.NodeID); n != 0 {
		t.Error("the namespace's deletion revoked the node's certificate: a pruned folder must not revoke a fleet")
	}
}

func TestApproverMayNotTouchStatusOrWhatWasAsked(t *testing.T) {
	ns := tenant(t)
	pool(t, ns, "gpu", true)
	text := token(t, ns, "gpu", "gpu", 1)
	alice := user(t, ns, "alice", seeRequests, approvePool("gpu"), rbacv1.PolicyRule{
		APIGroups: []string{v1alpha1.GroupVersion.Group}, Resources: []string{"joinrequests/status"}, Verbs: []string{"get", "patch", "update"}})
	cfg, err := clientcmd.BuildConfigFromFlags("", alice)
	if err != nil {
		t.Fatal(err)
	}
	as, err := client.New(rest.CopyConfig(cfg), client.Options{Scheme: sys.kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	jr := request(t, ns, waits(t, sys.target(t), newMachine(t), text))
	for what, patch := range map[string]string{
		"what was asked":        `{"spec":{"pool":"other"}}`,
		"decision with a label": `{"metadata":{"labels":{"x":"y"}},"spec":{"decision":{"verdict":"Approved","decidedBy":{"username":"alice","groups":["system:authenticated"]}}}}`,
		"forged author":         `{"spec":{"decision":{"verdict":"Approved","decidedBy":{"username":"root","groups":["system:authenticated"]}}}}`,
	} {
		err := as.Patch(t.Context(), jr.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch)))
		if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v, want Forbidden or Invalid", what, err)
		}
	}
	err = as.Status().Patch(t.Context(), jr.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"status":{"othersWaiting":7}}`)))
	if !apierrors.IsForbidden(err) {
		t.Errorf("status: %v, want Forbidden", err)
	}
}
