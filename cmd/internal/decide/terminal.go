package decide

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	"golang.org/x/term"
	"k8s.io/apimachinery/pkg/api/meta"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

var errDeclined = errors.New("you did not agree, nothing was decided")

// confirmCount shows all and asks for their number.
func (o *options) confirmCount(requests []v1alpha1.JoinRequest) error {
	for i := range requests {
		show(o.streams.ErrOut, &requests[i])
	}
	n := len(requests)
	fmt.Fprintf(o.streams.ErrOut, "%d undecided in namespace %s. To %s all of them, type their number: ", n, o.namespace, o.verb())
	if o.answer() != fmt.Sprint(n) {
		return errDeclined
	}
	return nil
}

// confirm shows one and asks about it.
func (o *options) confirm(r *v1alpha1.JoinRequest) error {
	show(o.streams.ErrOut, r)
	verb := o.verb()
	where := ""
	if o.pool != "" {
		where += " into pool " + o.pool
	}
	if o.tenant != "" {
		where += " for tenant " + o.tenant
	}
	fmt.Fprintf(o.streams.ErrOut, "%s%s %s%s? [y/N] ", strings.ToUpper(verb[:1]), verb[1:], printable(r.Name), printable(where))
	if a := strings.ToLower(o.answer()); a != "y" && a != "yes" {
		return errDeclined
	}
	return nil
}

// answer is the line that was typed; none is no.
func (o *options) answer() string {
	line, err := o.in.ReadString('\n')
	if err != nil {
		fmt.Fprintln(o.streams.ErrOut)
		return ""
	}
	return strings.TrimSpace(line)
}

func interactive(in io.Reader) bool {
	f, ok := in.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// show prints what was asked, what was proved and what was only claimed.
func show(w io.Writer, r *v1alpha1.JoinRequest) {
	line := func(k, v string) {
		if v != "" {
			fmt.Fprintf(w, "  %-22s %s\n", printable(k)+":", printable(v))
		}
	}
	fmt.Fprintf(w, "%s/%s, asked %s ago\n", printable(r.Namespace), printable(r.Name), time.Since(r.CreationTimestamp.Time).Round(time.Second))
	line("attestor", strings.TrimSpace(r.Spec.Attestor+" "+r.Spec.AttestorVersion))
	line("role", string(r.Spec.Role))
	line("pool", r.Spec.Pool)
	line("site", r.Spec.Site)
	line("reclaims node", r.Spec.NodeName)
	line("key fingerprint", r.Spec.PublicKeySHA256)
	line("hardware key", r.Spec.HardwareKeySHA256)
	for _, k := range slices.Sorted(maps.Keys(r.Spec.Facts)) {
		line("proved "+k, string(r.Spec.Facts[k]))
	}
	for _, k := range slices.Sorted(maps.Keys(r.Spec.Claims)) {
		line("claimed "+k+" (unproved)", string(r.Spec.Claims[k]))
	}
	if n := r.Status.OthersWaiting; n > 0 {
		line("others waiting", fmt.Sprintf("%d more with the same unproved subject", n))
	}
	if c := meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionReady); c != nil && c.Reason != v1alpha1.ReasonAwaitingDecision {
		line("state", c.Reason+": "+c.Message)
	}
}

// printable keeps off a terminal what it would obey instead of showing: control
// characters, escapes, and the marks that turn the direction of text.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// printableLines is printable for a text of several lines.
func printableLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = printable(strings.ReplaceAll(lines[i], "\t", "  "))
	}
	return strings.Join(lines, "\n")
}
