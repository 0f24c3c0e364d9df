package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/claims"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/agent/trust"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

const defaultStateDir = "/var/lib/bcd"

type joinFlags struct {
	stateDir, bundle           string
	token, tokenFile, tokenEnv string
	role, keyType              string
	claims                     []string
	outputs                    state.Outputs
	once                       bool
	waitLimit, requestTimeout  time.Duration
	output, logLevel           string
}

func newJoinCommand(s streams) *cobra.Command {
	var f joinFlags
	cmd := &cobra.Command{
		Use:   "join",
		Short: "Join this machine to a fleet",
		Long: `Join this machine to a fleet with a join token.

bcd makes one key and one certificate request, keeps them, and asks until a
signed answer says that the machine has joined. It waits while a person has to
decide, and goes on asking after a refusal, which could be anybody's word. It
may be stopped at any time and started again; a machine that has joined is left
as it is.`,
		Example: `  bcd join --bundle bundle.json --token-file token --cert-out /etc/node/tls.crt --key-out /etc/node/tls.key --ca-out /etc/node/ca.crt
  bcd join --bundle bundle.json --token-env JOIN_TOKEN --once --output json`,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), s) },
	}
	f.register(cmd, state.ECDSAP256)
	fl := cmd.Flags()
	fl.DurationVar(&f.waitLimit, "wait-timeout", 0, "stop after so long without having joined; 0 never stops")
	fl.StringVar(&f.output, "output", "text", "form of the result on the standard output: text or json")
	return cmd
}

// register adds what "bcd run" takes as well.
func (f *joinFlags) register(cmd *cobra.Command, keyType state.KeyType) {
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVar(&f.stateDir, "state-dir", defaultStateDir, "directory of the key, the request, the pinned bundle and the identity")
	fl.StringVar(&f.bundle, "bundle", "", "file of the join bundle to pin; needed the first time only")
	fl.StringVar(&f.tokenFile, "token-file", "", "file of the join token; - is the standard input; not read once the machine has joined")
	fl.StringVar(&f.tokenEnv, "token-env", "", "name of the environment variable that holds the join token")
	fl.StringVar(&f.token, "token", "", "the join token itself; every user of this machine can see it while bcd runs")
	fl.StringVar(&f.role, "role", string(wire.RoleNode), "what to join as: node, site or ramdisk")
	fl.StringVar(&f.keyType, "key-type", string(keyType), "kind of key to make: "+keyTypeList())
	fl.StringArrayVar(&f.claims, "claim", nil, "name=value in place of what the firmware says: productUUID, serialNumber, macAddresses (separated by commas), hardwareKeySHA256; an empty value leaves it out")
	fl.StringVar(&f.outputs.Key, "key-out", "", "write the private key here too")
	fl.StringVar(&f.outputs.Cert, "cert-out", "", "write the certificate and its chain here too")
	fl.StringVar(&f.outputs.CA, "ca-out", "", "write the authorities of node certificates here too")
	fl.BoolVar(&f.once, "once", false, "ask once, whatever is answered; the exit code tells")
	fl.DurationVar(&f.requestTimeout, "request-timeout", 30*time.Second, "limit of one request to one endpoint")
	fl.StringVar(&f.logLevel, "log-level", "warn", "least level that is logged: debug, info, warn or error")
}

func keyTypeList() string {
	var names []string
	for _, k := range state.KeyTypes() {
		names = append(names, string(k))
	}
	return strings.Join(names, ", ")
}

// run joins, and prints the result in the form that was asked for.
func (f *joinFlags) run(ctx context.Context, s streams) error {
	if f.output != "text" && f.output != "json" {
		return usageError("--output must be text or json")
	}
	joined, files, err := f.join(ctx, s)
	if f.output == "json" {
		if printErr := printJSON(s.out, joinResultOf(joined, files, err)); printErr != nil {
			return localError{printErr}
		}
		if err != nil {
			printError(s.err, err)
			return shownError{err}
		}
		return nil
	}
	if err != nil {
		return err
	}
	id := joined.Identity
	fmt.Fprintf(s.out, "joined as %s\n", id.SPIFFEID())
	fmt.Fprintf(s.out, "certificate  %s (until %s)\n", files.Cert, id.NotAfter.UTC().Format(time.RFC3339))
	fmt.Fprintf(s.out, "key          %s\n", files.Key)
	fmt.Fprintf(s.out, "authorities  %s\n", files.CA)
	return nil
}

func (f *joinFlags) join(ctx context.Context, s streams) (joined *agent.Joined, files state.Outputs, err error) {
	err = f.with(s, func(e agent.Event) { tell(s.err, e) }, func(m *agent.Machine, dir *state.Dir, o agent.JoinOptions) error {
		joined, err = m.Join(ctx, o)
		files = shownFiles(dir, f.outputs)
		return err
	})
	return joined, files, err
}

// with opens the state directory and makes a machine of it for as long as use runs.
func (f *joinFlags) with(s streams, observe func(agent.Event), use func(*agent.Machine, *state.Dir, agent.JoinOptions) error) (err error) {
	logger, err := newLogger(s.err, f.logLevel)
	if err != nil {
		return err
	}
	options, err := f.options()
	if err != nil {
		return err
	}
	dir, err := state.Open(f.stateDir)
	if err != nil {
		if errors.Is(err, state.ErrLocked) {
			return err
		}
		return localError{err}
	}
	defer func() {
		if closeErr := dir.Close(); err == nil && closeErr != nil {
			err = localError{closeErr}
		}
	}()
	if options.Producer, err = f.producer(dir, s); err != nil {
		return err
	}
	bundle, err := f.readBundle(dir)
	if err != nil {
		return err
	}
	m, err := agent.New(agent.Config{
		State: dir, FirstBundle: bundle, KeyType: state.KeyType(f.keyType), Logger: logger,
		RequestTimeout: f.requestTimeout, Observe: observe,
	})
	if errors.Is(err, agent.ErrNoBundle) {
		return usageError("no join bundle is pinned yet: give one with --bundle")
	}
	if is[*agent.BundleError](err) {
		return usageError(err.Error())
	}
	if err != nil {
		return localError{err}
	}
	fingerprint, err := m.PublicKeySHA256()
	if err != nil {
		return localError{err}
	}
	fmt.Fprintf(s.err, "key fingerprint (publicKeySHA256) %s\n", fingerprint)
	return use(m, dir, options)
}

// options are the parts of the flags that need no file.
func (f *joinFlags) options() (agent.JoinOptions, error) {
	o := agent.JoinOptions{Role: wire.Role(f.role), Outputs: f.outputs, Once: f.once, WaitLimit: f.waitLimit}
	if !o.Role.Valid() {
		return o, usageError("--role must be node, site or ramdisk")
	}
	if f.keyType != "" && !slices.Contains(state.KeyTypes(), state.KeyType(f.keyType)) {
		return o, usageError("--key-type must be one of " + keyTypeList())
	}
	if (f.token != "" && f.tokenFile+f.tokenEnv != "") || (f.tokenFile != "" && f.tokenEnv != "") {
		return o, usageError("give the token one way: --token-file, --token-env or --token")
	}
	if f.waitLimit < 0 || f.requestTimeout <= 0 {
		return o, usageError("--wait-timeout must not be negative, and --request-timeout must be positive")
	}
	// What cannot be listed is left out: claims prove nothing.
	cards, _ := net.Interfaces()
	var err error
	if o.Claims, err = claims.Override(claims.Collect(os.DirFS("/sys"), cards), f.claims); err != nil {
		return o, usageError(err.Error())
	}
	return o, nil
}

// producer reads the token. A machine that has joined needs none, and may have
// lost the file long ago.
func (f *joinFlags) producer(dir *state.Dir, s streams) (attestors.Producer, error) {
	if _, err := dir.Identity(); !errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	text, given, err := f.readToken(s)
	if err != nil {
		return nil, err
	}
	if !given {
		return nil, usageError("a join needs a token: give it with --token-file, --token-env, or --token-file - for the standard input")
	}
	p, err := jointoken.NewProducer(text)
	if err != nil {
		return nil, usageError("what was given is not a join token: one is bcjt_, 12 and 32 characters and a checksum; was it copied whole?")
	}
	return p, nil
}

func (f *joinFlags) readToken(s streams) (text string, given bool, err error) {
	switch {
	case f.token != "":
		fmt.Fprintln(s.err, "bcd: warning: a token on the command line can be read by every user of this machine; use --token-file or --token-env")
		return f.token, true, nil
	case f.tokenEnv != "":
		text, ok := os.LookupEnv(f.tokenEnv)
		if !ok {
			return "", false, usageError("the environment variable " + f.tokenEnv + " is not set")
		}
		return strings.TrimSpace(text), true, nil
	case f.tokenFile != "":
		raw, err := readSmall(f.tokenFile, s.in)
		if err != nil {
			return "", false, usageError("read the token: " + err.Error())
		}
		return strings.TrimSpace(string(raw)), true, nil
	default:
		return "", false, nil
	}
}

// readBundle reads the file that was given, which only a first start needs.
func (f *joinFlags) readBundle(dir *state.Dir) ([]byte, error) {
	if f.bundle == "" {
		return nil, nil
	}
	if _, err := os.Stat(f.bundle); errors.Is(err, fs.ErrNotExist) {
		if _, err := dir.Bundle(); err == nil {
			return nil, nil
		}
	}
	file, err := os.Open(f.bundle)
	if err != nil {
		return nil, usageError("read the bundle: " + err.Error())
	}
	defer file.Close()
	raw, err := io.ReadAll(io.LimitReader(file, trust.MaxBundle+1))
	if err != nil {
		return nil, usageError("read the bundle: " + err.Error())
	}
	return raw, nil
}

// readSmall reads a file, or the standard input for "-", of at most 4 KiB.
func readSmall(name string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		in = file
	}
	return io.ReadAll(io.LimitReader(in, 4<<10))
}

func newLogger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usageError("--log-level must be debug, info, warn or error")
	}
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: l})), nil
}

// shownFiles is where a person finds what was stored.
func shownFiles(dir *state.Dir, out state.Outputs) state.Outputs {
	files := dir.CurrentFiles()
	for _, f := range []struct{ shown, asked *string }{{&files.Key, &out.Key}, {&files.Cert, &out.Cert}, {&files.CA, &out.CA}} {
		if *f.asked != "" {
			*f.shown = *f.asked
		}
	}
	return files
}

// tell prints progress for a person.
func tell(w io.Writer, e agent.Event) {
	switch e := e.(type) {
	case agent.AwaitingDecision:
		fmt.Fprintf(w, "waiting for a person to decide join request %s\n%s", e.JoinRequest, howToApprove(e.JoinRequest, e.Tenant))
	case agent.ClockWrong:
		fmt.Fprint(w, clockAdvice(e))
	case agent.BundleAdopted:
		fmt.Fprintf(w, "adopted generation %d of the join bundle\n", e.Generation)
	case agent.Waiting:
		if is[*agent.PendingError](e.Reason) {
			return
		}
		fmt.Fprintf(w, "%s; asking again in %s\n", agent.Summary(e.Reason), e.For.Round(time.Second))
	}
}

// clockAdvice says by how much a clock is wrong, and what to do.
func clockAdvice(e agent.ClockWrong) string {
	direction := "ahead of"
	if e.Ahead < 0 {
		direction = "behind"
	}
	return fmt.Sprintf("this machine's clock is %s %s the service's, which says %s\n"+
		"  bcd goes by the service's time; programs that check certificates by this clock may refuse good ones\n"+
		"  set it with  timedatectl set-ntp true  or  chronyc makestep\n",
		e.Ahead.Abs().Round(time.Second), direction, e.ServiceTime.UTC().Format(time.RFC3339))
}

// howToApprove is what an approver types. Answers need not name the namespace.
func howToApprove(joinRequest, tenant string) string {
	if tenant == "" {
		return fmt.Sprintf("  find it with  kubectl get joinrequests --all-namespaces --field-selector metadata.name=%s\n  approve with  kubectl approve joinrequest %s --namespace NAMESPACE\n", joinRequest, joinRequest)
	}
	return fmt.Sprintf("  approve with  kubectl approve joinrequest %s --namespace %s\n", joinRequest, tenant)
}

// joinResult is the result of "bcd join --output json".
type joinResult struct {
	// Outcome names the exit code.
	Outcome string         `json:"outcome"`
	Error   string         `json:"error,omitempty"`
	Node    *shownIdentity `json:"node,omitempty"`
	Files   *shownPaths    `json:"files,omitempty"`
	// Confirmed and AlreadyJoined are there for outcome joined alone.
	Confirmed     *bool  `json:"confirmed,omitempty"`
	AlreadyJoined *bool  `json:"alreadyJoined,omitempty"`
	JoinRequest   string `json:"joinRequest,omitempty"`
	Tenant        string `json:"tenant,omitempty"`
	// RetryAfterSeconds is how long a signed answer or an endpoint asks to wait.
	RetryAfterSeconds int       `json:"retryAfterSeconds,omitempty"`
	Problem           wire.Code `json:"problem,omitempty"`
}

func joinResultOf(joined *agent.Joined, files state.Outputs, err error) joinResult {
	if err == nil {
		return joinResult{
			Outcome: outcome(exitOK), Node: shown(joined.Identity), Files: paths(files),
			Confirmed: &joined.Confirmed, AlreadyJoined: &joined.Before,
		}
	}
	r := joinResult{Outcome: outcome(exitCode(err)), Error: agent.Summary(err)}
	if p, ok := errors.AsType[*agent.PendingError](err); ok {
		r.JoinRequest, r.Tenant, r.RetryAfterSeconds = p.JoinRequest, p.Tenant, int(p.RetryAfter/time.Second)
	} else if p, ok := errors.AsType[*agent.ProblemError](err); ok {
		r.Problem, r.RetryAfterSeconds = p.Code, int(p.RetryAfter/time.Second)
	}
	return r
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
