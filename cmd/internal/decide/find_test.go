package decide

import (
	"fmt"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

func contains(s, part string) bool { return strings.Contains(s, part) }

// lackOf is the plugin's own part of a refusal, after the API server's.
func lackOf(s string) string {
	_, own, _ := strings.Cut(s, "You lack")
	return own
}

func labelled(k, v string) func(*v1alpha1.JoinRequest) {
	return func(jr *v1alpha1.JoinRequest) { jr.Labels = map[string]string{k: v} }
}

func TestRequestsAreNamedAsKubectlNamesThings(t *testing.T) {
	w := newWorld(t)
	alice, _, _ := w.people(t)
	for _, form := range []string{
		"jr %s", "jr %s %s", "joinrequest %s", "joinrequests %s", "jr/%s", "joinrequest/%s jr/%s",
		"joinrequest.join.better-compute.dev %s", "joinrequests.join.better-compute.dev/%s",
	} {
		t.Run(form, func(t *testing.T) {
			var asked []*v1alpha1.JoinRequest
			var names []any
			for range strings.Count(form, "%s") {
				jr := w.ask(t, "gpu")
				asked, names = append(asked, jr), append(names, jr.Name)
			}
			args := append(strings.Fields(fmt.Sprintf(form, names...)), "--yes", "--message", "seen in the rack")
			w.run(t, alice, approved, args...).want(t, ExitDone, asked[0].Name+" approved", asked[len(asked)-1].Name+" approved")
			for _, jr := range asked {
				w.wantVerdict(t, jr, approved, "alice")
				if m := w.read(t, jr).Spec.Decision.Message; m != "seen in the rack" {
					t.Errorf("message %q", m)
				}
			}
		})
	}
}

func TestLabelsAndAllSelectTheUndecided(t *testing.T) {
	w := newWorld(t)
	alice, _, _ := w.people(t)
	a, b, c := w.ask(t, "gpu", labelled("rack", "1")), w.ask(t, "gpu", labelled("rack", "1")), w.ask(t, "gpu", labelled("rack", "2"))
	w.run(t, alice, rejected, "jr", a.Name, "--yes").want(t, ExitDone)
	w.run(t, alice, approved, "jr", "-l", "rack=1", "--yes").want(t, ExitDone, b.Name)
	w.wantVerdict(t, a, rejected, "alice")
	w.wantVerdict(t, b, approved, "alice")
	w.wantVerdict(t, c, "", "")
	d := w.ask(t, "gpu", labelled("rack", "3"))
	w.run(t, alice, approved, "jr", "--all", "-l", "rack=3", "--yes").want(t, ExitDone, d.Name)
	w.wantVerdict(t, c, "", "")
	w.run(t, alice, rejected, "jr", "--all", "--yes").want(t, ExitDone, c.Name)
	w.wantVerdict(t, c, rejected, "alice")
	w.run(t, alice, rejected, "jr", "--all", "--yes").want(t, ExitDone, "no undecided join requests in namespace "+w.ns)
}

// What fails for one name does not stand in the way of the others, and the exit code
// speaks for all that failed or says that it cannot.
func TestOneOfSeveralFails(t *testing.T) {
	w := newWorld(t)
	alice, _, carol := w.people(t)
	good, other, no := w.ask(t, "gpu"), w.ask(t, "cpu"), w.ask(t, "gpu")
	w.run(t, alice, rejected, "jr", no.Name, "--yes").want(t, ExitDone)
	w.run(t, carol, approved, "jr", "missing", other.Name, good.Name, "--yes").
		want(t, ExitFailed, `error: joinrequest missing: `, "not found in namespace "+w.ns, "error: joinrequest "+other.Name+": ", good.Name+" approved")
	w.wantVerdict(t, good, approved, "carol")
	w.wantVerdict(t, other, "", "")
	last := w.ask(t, "gpu")
	w.run(t, carol, approved, "jr", other.Name, last.Name, "--yes").want(t, ExitForbidden, last.Name+" approved")
	w.run(t, carol, approved, "jr", no.Name, good.Name, "--yes").want(t, ExitConflict, "already rejected by alice", "already approved by carol")
	w.run(t, carol, approved, "jr", no.Name, other.Name, "--yes").want(t, ExitFailed)
	twice := w.ask(t, "gpu")
	w.run(t, alice, approved, "jr", twice.Name, twice.Name, "--yes").want(t, ExitDone, "already approved by alice")
}

func TestWordsThatAreOff(t *testing.T) {
	w := newWorld(t)
	alice, _, _ := w.people(t)
	jr := w.ask(t, "gpu")
	for _, tc := range []struct {
		args string
		says string
	}{
		{"--yes", "joinrequest NAME"},
		{"jr --yes", "give a name, --selector or --all"},
		{"pods x --yes", `not "pods"`},
		{"pods/x --yes", "pods/x"},
		{"jr/ --yes", "jr/"},
		{"jr/a b --yes", `"b"`},
		{"jr a jr/b --yes", "either"},
		{"jr NAME --all --yes", "not both"},
		{"jr NAME -l a=b --yes", "not both"},
		{"jr -l a==,,b --yes", "--selector"},
		{"jr NAME --yes -o xml", "xml"},
		{"jr NAME --yes --dry-run=maybe", "maybe"},
		{"jr NAME --yes --wait --timeout=0s", "--timeout"},
		{"jr NAME --yes --frobnicate", "frobnicate"},
		{"jr NAME --yes --message=a\x1b[31m", "one line"},
		{"jr NAME --yes --message=" + strings.Repeat("m", 1025), "1024"},
		{"jr NAME", "no terminal to ask at: give --yes"},
		{"jr --all", "no terminal to ask at: give --yes"},
	} {
		t.Run(tc.args[:min(len(tc.args), 40)], func(t *testing.T) {
			args := strings.Fields(strings.ReplaceAll(tc.args, "NAME", jr.Name))
			res := w.run(t, alice, approved, args...)
			res.want(t, ExitUsage, tc.says)
			if contains(res.err, "\x1b") {
				t.Error("an escape on the terminal")
			}
		})
	}
	w.run(t, alice, rejected, "jr", jr.Name, "--yes", "--pool=gpu").want(t, ExitUsage, "pool")
	w.wantVerdict(t, jr, "", "")
}
