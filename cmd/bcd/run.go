package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/state"
)

type runFlags struct {
	joinFlags
	reload reloadFlags
}

func newRunCommand(s streams) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Join this machine to a fleet and keep its certificate fresh",
		Long: `Join this machine to a fleet, and from then on renew its certificate in time, for
ever. It is what a service manager starts; docs/bcd.md has a unit for systemd.

A machine that has joined needs neither a token nor a bundle. A certificate that
ran out while the machine was off is replaced by a join with it. Nothing that an
endpoint answers ends bcd run, since no refusal is signed: it asks again, and
says what an operator sees and can do. SIGTERM ends it with exit code 0.`,
		Example: `  bcd run --bundle bundle.json --token-file token --cert-out /etc/node/tls.crt --key-out /etc/node/tls.key --ca-out /etc/node/ca.crt --reload-command "systemctl reload nginx"
  bcd run --once --output json`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), s) },
	}
	f.register(cmd, "")
	f.reload.register(cmd)
	fl := cmd.Flags()
	fl.Lookup("key-type").Usage += "; the default is ecdsa-p256, and for a renewal the kind of the key before it"
	fl.Lookup("once").Usage = "do what is due now and end; the exit code tells"
	fl.StringVar(&f.output, "output", "text", "text tells a person on the standard error; json prints an event a line on the standard output")
	return cmd
}

func (f *runFlags) run(ctx context.Context, s streams) error {
	if f.output != "text" && f.output != "json" {
		return usageError("--output must be text or json")
	}
	teller := runTeller{s: s, json: f.output == "json"}
	err := f.with(s, teller.tell, func(m *agent.Machine, dir *state.Dir, o agent.JoinOptions) error {
		reload, err := f.reload.command(s, shownFiles(dir, f.outputs), f.tokenEnv)
		if err != nil {
			return err
		}
		return m.Run(ctx, agent.RunOptions{Join: o, Reload: reload})
	})
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	teller.stopped(err)
	if err != nil && teller.json {
		printError(s.err, err)
		return shownError{err}
	}
	return err
}

// runEvent is a line of "bcd run --output json".
type runEvent struct {
	Time  time.Time `json:"time"`
	Event string    `json:"event"`
	// Way is how the certificate was got: join, renewal or rejoin.
	Way  agent.Way      `json:"way,omitempty"`
	Node *shownIdentity `json:"node,omitempty"`
	// Outcome classes the reason of a wait or of the end, as exit codes do.
	Outcome     string     `json:"outcome,omitempty"`
	Reason      string     `json:"reason,omitempty"`
	ForSeconds  *int64     `json:"forSeconds,omitempty"`
	At          *time.Time `json:"at,omitempty"`
	JoinRequest string     `json:"joinRequest,omitempty"`
	Tenant      string     `json:"tenant,omitempty"`
	// AheadSeconds is negative where the clock lags.
	AheadSeconds *int64 `json:"aheadSeconds,omitempty"`
	Generation   int    `json:"generation,omitempty"`
	// Advice is what a person can do.
	Advice string `json:"advice,omitempty"`
}

// runTeller tells what happens, as text or as JSON.
type runTeller struct {
	s    streams
	json bool
	// advised is the certificate whose refusal was explained last.
	advised string
}

func (t *runTeller) tell(e agent.Event) {
	if t.json {
		t.print(eventOf(e))
		return
	}
	w := t.s.err
	switch e := e.(type) {
	case agent.Admitted:
		verb := map[agent.Way]string{agent.ByJoin: "joined as", agent.ByRenewal: "renewed", agent.ByRejoin: "joined again, by the certificate that ran out, as"}[e.Way]
		fmt.Fprintf(w, "%s %s (certificate until %s)\n", verb, e.Identity.SPIFFEID(), e.Identity.NotAfter.UTC().Format(time.RFC3339))
		t.advised = ""
	case agent.RenewalPlanned:
		fmt.Fprintf(w, "the next renewal is at %s\n", e.At.UTC().Format(time.RFC3339))
	case agent.Reloaded:
		if e.Err != nil {
			fmt.Fprintf(w, "the reload command failed: %s; it is run again at the next start and for the next certificate\n", agent.Summary(e.Err))
		}
	case agent.Waiting:
		tell(w, e)
		if e.Identity != nil && t.advised != e.Identity.CertificateSHA256 {
			if advice := renewalAdvice(e); advice != "" {
				t.advised = e.Identity.CertificateSHA256
				fmt.Fprint(w, advice)
			}
		}
	default:
		tell(w, e)
	}
}

// renewalAdvice is what to do about a renewal that is refused, which the machine
// itself is never told the reason of.
func renewalAdvice(e agent.Waiting) string {
	id := e.Identity
	switch {
	case errors.Is(e.Reason, agent.ErrNoProver):
		return fmt.Sprintf("  this bcd cannot prove the key of node %s; start the bcd that the machine joined with, or start over: bcd reset --yes, and a new token\n", id.NodeID)
	case !agent.IsRefused(e.Reason):
		return ""
	}
	return fmt.Sprintf(`  the service does not renew the certificate of node %[1]s (serial %[3]s, until %[4]s). Why, only an operator sees:
    kubectl describe fleetnode %[1]s --namespace %[2]s
    kubectl get events --namespace %[2]s --field-selector reason=JoinRefused
  - Conflicted: a copy of this machine uses the same identity. Run bcd reset --yes on the copy, then resolve the condition
  - retired, deleted, or off for too long: run bcd reset --yes here, and join with a new token
  bcd goes on asking, in case that it was a mistake
`, id.NodeID, id.Tenant, id.Serial, id.NotAfter.UTC().Format(time.RFC3339))
}

func (t *runTeller) stopped(err error) {
	if !t.json {
		if err == nil {
			fmt.Fprintln(t.s.err, "stopped")
		}
		return
	}
	e := runEvent{Event: "stopped", Outcome: "stopped"}
	if err != nil {
		e.Outcome, e.Reason = outcome(exitCode(err)), agent.Summary(err)
	}
	t.print(e)
}

func (t *runTeller) print(e runEvent) {
	e.Time = time.Now().UTC()
	// A reader that went away must not end a machine's renewals.
	_ = json.NewEncoder(t.s.out).Encode(e)
}

func eventOf(e agent.Event) runEvent {
	seconds := func(d time.Duration) *int64 { n := int64(d.Round(time.Second) / time.Second); return &n }
	switch e := e.(type) {
	case agent.Admitted:
		return runEvent{Event: "admitted", Way: e.Way, Node: shown(e.Identity), Generation: e.Identity.Generation}
	case agent.RenewalPlanned:
		return runEvent{Event: "renewal-planned", At: &e.At, ForSeconds: seconds(e.In)}
	case agent.Confirmed:
		return runEvent{Event: "confirmed"}
	case agent.Reloaded:
		r := runEvent{Event: "reloaded"}
		if e.Err != nil {
			r.Reason = agent.Summary(e.Err)
		}
		return r
	case agent.Waiting:
		r := runEvent{Event: "waiting", Outcome: outcome(exitCode(e.Reason)), Reason: agent.Summary(e.Reason), ForSeconds: seconds(e.For)}
		if e.Identity != nil {
			r.Node, r.Advice = shown(e.Identity), renewalAdvice(e)
		}
		return r
	case agent.AwaitingDecision:
		return runEvent{Event: "awaiting-decision", JoinRequest: e.JoinRequest, Tenant: e.Tenant, Advice: howToApprove(e.JoinRequest, e.Tenant)}
	case agent.ClockWrong:
		return runEvent{Event: "clock-wrong", AheadSeconds: seconds(e.Ahead), At: &e.ServiceTime, Advice: clockAdvice(e)}
	case agent.BundleAdopted:
		return runEvent{Event: "bundle-adopted", Generation: e.Generation}
	default:
		return runEvent{Event: fmt.Sprintf("%T", e)}
	}
}
