// Package decide is the body of kubectl-approve and kubectl-reject, and of what
// completes their words in a shell: a person's decision about machines that wait. It
// holds nothing but the person's own kubeconfig.
package decide

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

type options struct {
	verdict v1alpha1.Verdict
	flags   *genericclioptions.ConfigFlags
	printed *genericclioptions.PrintFlags
	streams genericiooptions.IOStreams

	selector, message, pool, tenant, dryRun string
	all, yes, wait                          bool
	timeout                                 time.Duration

	printer   printers.ResourcePrinter
	client    client.Client
	namespace string
	in        *bufio.Reader
}

// verb is how people say it: approve or reject.
func (o *options) verb() string {
	if o.verdict == v1alpha1.VerdictApproved {
		return "approve"
	}
	return "reject"
}

func (o *options) done() string { return strings.ToLower(string(o.verdict)) }

// Main runs a plugin and returns its exit code.
func Main(verdict v1alpha1.Verdict) int {
	return Run(context.Background(), verdict, os.Args[1:], genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr})
}

// Complete answers a shell through kubectl, which calls kubectl_complete-approve with
// the words after `kubectl approve`, the last one unfinished (kubectl's convention for
// plugins). The answer is cobra's: a choice a line, then a colon and a directive.
func Complete(verdict v1alpha1.Verdict) int {
	words := append([]string{cobra.ShellCompRequestCmd}, os.Args[1:]...)
	return Run(context.Background(), verdict, words, genericiooptions.IOStreams{In: strings.NewReader(""), Out: os.Stdout, ErrOut: io.Discard})
}

// Run runs `kubectl approve` or `kubectl reject` with the words after it, says on
// ErrOut what went wrong, one error a line, and returns the exit code.
func Run(ctx context.Context, verdict v1alpha1.Verdict, args []string, streams genericiooptions.IOStreams) int {
	cmd := command(verdict, streams)
	cmd.SetArgs(args)
	err := cmd.ExecuteContext(ctx)
	for _, e := range each(err) {
		fmt.Fprintln(streams.ErrOut, "error:", printableLines(e.Error()))
	}
	return exitCode(err)
}

func command(verdict v1alpha1.Verdict, streams genericiooptions.IOStreams) *cobra.Command {
	o := &options{verdict: verdict, flags: genericclioptions.NewConfigFlags(true), streams: streams, in: bufio.NewReader(streams.In)}
	o.printed = genericclioptions.NewPrintFlags(o.done()).WithTypeSetter(scheme)
	verb := o.verb()
	cmd := &cobra.Command{
		Use:   "kubectl " + verb + " joinrequest NAME...",
		Short: verb + " machines that wait to join",
		Long: "Shows what each machine asked, asks you, and writes your decision, which is final.\n\n" +
			"With -l it asks about each undecided request with these labels; with --all it shows all\n" +
			"undecided ones (of the labels, where -l is given too) and asks once, for their number.\n\n" + exitCodes,
		Example: fmt.Sprintf("  kubectl %[1]s joinrequest jr-3kq7n2zv5mwa4yxd\n  kubectl %[1]s jr/jr-3kq7n2zv5mwa4yxd --message 'seen in the rack'\n"+
			"  kubectl %[1]s jr -l join.better-compute.dev/attestor-type=tpm\n  kubectl %[1]s jr --all", verb),
		SilenceUsage: true, SilenceErrors: true,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl " + verb},
		ValidArgsFunction: o.complete,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	cmd.SetOut(streams.Out)
	cmd.SetErr(streams.ErrOut)
	f := cmd.Flags()
	o.flags.AddFlags(f)
	o.printed.AddFlags(cmd)
	f.StringVarP(&o.selector, "selector", "l", "", "decide about the undecided requests with these labels")
	f.BoolVar(&o.all, "all", false, "decide about all undecided requests of the namespace")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	f.StringVarP(&o.message, "message", "m", "", "why, for others to read: one line")
	if verdict == v1alpha1.VerdictApproved {
		f.StringVar(&o.pool, "pool", "", "approve into another pool of the tenant")
		f.StringVar(&o.tenant, "tenant", "", "claim an unassigned machine, one that waits in the operator's namespace, for this tenant")
	}
	f.StringVar(&o.dryRun, "dry-run", "none", "none, client (say what would be sent) or server (have the API server check it); neither asks")
	f.BoolVar(&o.wait, "wait", false, "wait until the decisions are recorded")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait, in all")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	o.completeFlags(cmd)
	return cmd
}

var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, authenticationv1.AddToScheme, authorizationv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return s
}()

// connect makes the client and finds the namespace.
func (o *options) connect() error {
	cfg, err := o.flags.ToRESTConfig()
	if err != nil {
		return err
	}
	// A person who decides about hundreds does not wait for the client's own limit of
	// five a second: the API server has its fairness.
	cfg.QPS, cfg.Burst = 50, 300
	// The kinds are known, so nothing has to be discovered.
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []string{"JoinRequest", "FleetPool"} {
		mapper.Add(v1alpha1.GroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	mapper.Add(authenticationv1.SchemeGroupVersion.WithKind("SelfSubjectReview"), meta.RESTScopeRoot)
	mapper.Add(authorizationv1.SchemeGroupVersion.WithKind("SelfSubjectAccessReview"), meta.RESTScopeRoot)
	if o.client, err = client.New(cfg, client.Options{Scheme: scheme, Mapper: mapper}); err != nil {
		return err
	}
	o.namespace, _, err = o.flags.ToRawKubeConfigLoader().Namespace()
	return err
}

// whoAmI is the user as the API server knows them, whom the decision must name.
func (o *options) whoAmI(ctx context.Context) (v1alpha1.UserInfo, error) {
	review := &authenticationv1.SelfSubjectReview{}
	if err := o.client.Create(ctx, review); err != nil {
		return v1alpha1.UserInfo{}, fmt.Errorf("ask the API server who you are: %w", err)
	}
	u := review.Status.UserInfo
	me := v1alpha1.UserInfo{Username: u.Username, UID: u.UID, Groups: u.Groups}
	for k, v := range u.Extra {
		if me.Extra == nil {
			me.Extra = map[string]v1alpha1.ExtraValue{}
		}
		me.Extra[k] = v1alpha1.ExtraValue(v)
	}
	return me, nil
}

// each is the errors that were joined.
func each(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok { //nolint:errorlint // the outermost one alone
		return joined.Unwrap()
	}
	return []error{err}
}
