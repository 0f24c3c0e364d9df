package main

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
)

type statusFlags struct {
	stateDir, output string
}

func newStatusCommand(s streams) *cobra.Command {
	var f statusFlags
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say whether this machine has joined, and as what",
		Long: `Say whether this machine has joined, and as what. It reads the state directory
alone, talks to nobody, and may be run beside "bcd run". The exit code is 0 for
a machine with a certificate in force; docs/bcd.md has the others.`,
		RunE: func(*cobra.Command, []string) error { return f.run(s, time.Now()) },
	}
	cmd.Flags().StringVar(&f.stateDir, "state-dir", defaultStateDir, "directory of the key, the request, the pinned bundle and the identity")
	cmd.Flags().StringVar(&f.output, "output", "text", "form of the status on the standard output: text or json")
	return cmd
}

// status is the result of "bcd status --output json".
type status struct {
	// State is joined, pending, expired or not-joined.
	State           string         `json:"state"`
	Node            *shownIdentity `json:"node,omitempty"`
	Files           *shownPaths    `json:"files,omitempty"`
	Confirmed       bool           `json:"confirmed"`
	PublicKeySHA256 string         `json:"publicKeySHA256,omitempty"`
	CSRSHA256       string         `json:"csrSHA256,omitempty"`
	Bundle          *shownBundle   `json:"bundle,omitempty"`
	Pending         *state.Pending `json:"pending,omitempty"`
	LastProblem     string         `json:"lastProblem,omitempty"`
	LastTriedAt     *time.Time     `json:"lastTriedAt,omitempty"`
	// Renewal is there for a machine with an identity.
	Renewal *shownRenewal `json:"renewal,omitempty"`
	// ClockOffsetSeconds is how far this machine's clock was ahead of the service's.
	ClockOffsetSeconds int64 `json:"clockOffsetSeconds"`
}

// shownRenewal is how the renewal of a certificate stands.
type shownRenewal struct {
	// At is when it is planned, by the service's time.
	At time.Time `json:"at"`
	// NextTryAt is there after an exchange that failed.
	NextTryAt *time.Time `json:"nextTryAt,omitempty"`
	// Unanswered is true while there is a key and a request for the next certificate.
	Unanswered bool `json:"unanswered"`
	// Generation counts the certificates that this machine has had, from 1.
	Generation int `json:"generation"`
	// Reload is how the reload command ended for this certificate or one before.
	Reload *state.Reload `json:"reload,omitempty"`
}

// shownIdentity is an identity as people and scripts see it.
type shownIdentity struct {
	SPIFFEID          string    `json:"spiffeID"`
	NodeID            string    `json:"nodeID"`
	Tenant            string    `json:"tenant"`
	Site              string    `json:"site,omitempty"`
	Pool              string    `json:"pool,omitempty"`
	Role              wire.Role `json:"role"`
	Attestor          string    `json:"attestor"`
	AllowedKinds      *[]string `json:"allowedKinds,omitempty"`
	NotBefore         time.Time `json:"notBefore"`
	NotAfter          time.Time `json:"notAfter"`
	Serial            string    `json:"serial"`
	CertificateSHA256 string    `json:"certificateSHA256"`
}

type shownPaths struct {
	Key  string `json:"key"`
	Cert string `json:"cert"`
	CA   string `json:"ca"`
}

type shownBundle struct {
	Generation  int    `json:"generation"`
	TrustDomain string `json:"trustDomain"`
	SHA256      string `json:"sha256"`
}

func shown(id *state.Identity) *shownIdentity {
	return &shownIdentity{
		SPIFFEID: id.SPIFFEID(), NodeID: id.NodeID, Tenant: id.Tenant, Site: id.Site, Pool: id.Pool, Role: id.Role,
		Attestor: id.Attestor, AllowedKinds: id.AllowedKinds, NotBefore: id.NotBefore, NotAfter: id.NotAfter,
		Serial: id.Serial, CertificateSHA256: id.CertificateSHA256,
	}
}

func paths(o state.Outputs) *shownPaths { return &shownPaths{Key: o.Key, Cert: o.Cert, CA: o.CA} }

func (f *statusFlags) run(s streams, now time.Time) error {
	if f.output != "text" && f.output != "json" {
		return usageError("--output must be text or json")
	}
	st, verdict := readStatus(f.stateDir, now)
	if verdict != nil && st == nil {
		return verdict
	}
	show := printStatus
	if f.output == "json" {
		show = func(w io.Writer, st *status, _ time.Time) error { return printJSON(w, st) }
	}
	if err := show(s.out, st, now); err != nil {
		return localError{err}
	}
	if verdict != nil {
		return shownError{verdict}
	}
	return nil
}

// readStatus reads a state directory. The error says what the exit code is made
// of; without a status it is all there is to say.
func readStatus(stateDir string, now time.Time) (*status, error) {
	st := &status{State: outcome(exitNotJoined)}
	dir, err := state.View(stateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return st, errNotJoined
	}
	if err != nil {
		return nil, localError{err}
	}
	if err := st.readRest(dir); err != nil {
		return nil, err
	}
	id, err := dir.Identity()
	switch {
	case errors.Is(err, fs.ErrNotExist) && st.Pending != nil:
		st.State = outcome(exitPending)
		return st, codedError{exitPending}
	case errors.Is(err, fs.ErrNotExist):
		return st, errNotJoined
	case err != nil:
		return nil, err
	}
	p, _ := dir.Progress() // readRest has read it
	st.Renewal = &shownRenewal{At: id.RenewAt, Generation: id.Generation, Reload: p.Reload}
	if !p.NextTryAt.IsZero() {
		st.Renewal.NextTryAt = &p.NextTryAt
	}
	if request, err := dir.Request(); err == nil {
		st.Renewal.Unanswered = !request.Became(id)
	}
	st.Node, st.Files = shown(id), paths(dir.CurrentFiles())
	st.Confirmed = p.ConfirmedSHA256 == id.CertificateSHA256
	st.State = outcome(exitOK)
	// A clock that the service has shown to be wrong does not make it so.
	if !agent.Now(now, p).Before(id.NotAfter) {
		st.State = outcome(exitExpired)
		return st, codedError{exitExpired}
	}
	return st, nil
}

// readRest reads everything but the identity.
func (st *status) readRest(dir *state.Dir) error {
	request, err := dir.Request()
	switch {
	case err == nil:
		if st.PublicKeySHA256, err = request.PublicKeySHA256(); err != nil {
			return localError{err}
		}
		sum := request.CSRSHA256()
		st.CSRSHA256 = hex.EncodeToString(sum[:])
	case !errors.Is(err, fs.ErrNotExist):
		return readError(err)
	}
	raw, err := dir.Bundle()
	switch {
	case err == nil:
		b, err := trust.Parse(raw)
		if err != nil {
			return &state.DamagedError{Path: dir.BundlePath(), Err: err, Remedy: "Remove it and give the bundle again with --bundle"}
		}
		st.Bundle = &shownBundle{Generation: b.Generation(), TrustDomain: b.TrustDomain(), SHA256: b.SHA256()}
	case !errors.Is(err, fs.ErrNotExist):
		return readError(err)
	}
	p, err := dir.Progress()
	if err != nil {
		return readError(err)
	}
	st.Pending, st.LastProblem, st.ClockOffsetSeconds = p.Pending, p.LastProblem, p.ClockOffsetSeconds
	if !p.LastTriedAt.IsZero() {
		st.LastTriedAt = &p.LastTriedAt
	}
	return nil
}

// readError tells what cannot be read from what is damaged.
func readError(err error) error {
	if is[*state.DamagedError](err) {
		return err
	}
	return localError{err}
}

func printStatus(w io.Writer, st *status, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	row("State", "%s", st.State)
	if id := st.Node; id != nil {
		row("Identity", "%s", id.SPIFFEID)
		row("Pool", "%s", orNone(id.Pool))
		row("Site", "%s", orNone(id.Site))
		row("Attestor", "%s", id.Attestor)
		row("Serial", "%s", id.Serial)
		row("Expires", "%s (%s)", id.NotAfter.UTC().Format(time.RFC3339), fromNow(id.NotAfter, now))
		row("Confirmed", "%t", st.Confirmed)
		row("Generation", "%d", st.Renewal.Generation)
		row("Renewal", "%s", renewalText(st.Renewal, now))
		row("Certificate", "%s", st.Files.Cert)
		row("Key", "%s", st.Files.Key)
		row("Authorities", "%s", st.Files.CA)
	}
	if st.PublicKeySHA256 != "" {
		row("Key fingerprint", "%s", st.PublicKeySHA256)
	}
	if p := st.Pending; p != nil {
		row("Join request", "%s (since %s)", p.JoinRequest, p.Since.UTC().Format(time.RFC3339))
	}
	if b := st.Bundle; b != nil {
		row("Bundle", "generation %d of %s", b.Generation, b.TrustDomain)
	}
	if r := st.Renewal; r != nil && r.Reload != nil && r.Reload.Problem != "" {
		row("Reload command", "failed at %s: %s", r.Reload.At.UTC().Format(time.RFC3339), r.Reload.Problem)
	}
	if st.LastTriedAt != nil && (st.Node == nil || st.LastProblem != "") {
		row("Last tried", "%s", st.LastTriedAt.UTC().Format(time.RFC3339))
	}
	if st.LastProblem != "" {
		row("Last problem", "%s", st.LastProblem)
	}
	if st.ClockOffsetSeconds != 0 {
		row("Clock", "%+d s from the service's", st.ClockOffsetSeconds)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if p := st.Pending; p != nil {
		_, err := io.WriteString(w, howToApprove(p.JoinRequest, p.Tenant))
		return err
	}
	return nil
}

func renewalText(r *shownRenewal, now time.Time) string {
	text := fmt.Sprintf("%s (%s)", r.At.UTC().Format(time.RFC3339), fromNow(r.At, now))
	if r.NextTryAt != nil {
		text += fmt.Sprintf("; tried, and again at %s", r.NextTryAt.UTC().Format(time.RFC3339))
	}
	if r.Unanswered {
		text += "; a request is not answered yet"
	}
	return text
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func fromNow(t, now time.Time) string {
	d := t.Sub(now).Round(time.Minute)
	if d < 0 {
		return (-d).String() + " ago"
	}
	return "in " + d.String()
}
