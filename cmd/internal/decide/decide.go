// Package decide is the body of kubectl-approve and kubectl-reject: a person's
// decision about machines that wait. It holds nothing but the person's own
// kubeconfig.
package decide

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// Exit codes of both plugins.
const (
	ExitDone      = 0 // every request that was named is decided as asked
	ExitFailed    = 1 // at least one is not
	ExitUsage     = 2 // the command's words are off
	ExitForbidden = 3 // a right is missing
	ExitConflict  = 4 // the request changed since it was shown, or is decided the other way
)

type options struct {
	verdict v1alpha1.Verdict
	flags   *genericclioptions.ConfigFlags
	streams genericiooptions.IOStreams

	selector, message, pool, tenant, dryRun, output string
	all, yes, wait                                  bool
	timeout                                         time.Duration

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
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	cmd := Command(verdict, streams)
	err := cmd.ExecuteContext(context.Background())
	if err != nil {
		fmt.Fprintln(streams.ErrOut, "error:", err)
	}
	return ExitCode(err)
}

// usageError is a command whose words are off.
type usageError struct{ error }

// forbiddenError names the right that is missing.
type forbiddenError struct{ error }

// conflictError is a request that is not what was shown.
type conflictError struct{ error }

// ExitCode is the exit code of an error of the command.
func ExitCode(err error) int {
	var usage usageError
	var forbidden forbiddenError
	var conflict conflictError
	switch {
	case err == nil:
		return ExitDone
	case errors.As(err, &usage):
		return ExitUsage
	case errors.As(err, &forbidden):
		return ExitForbidden
	case errors.As(err, &conflict):
		return ExitConflict
	default:
		return ExitFailed
	}
}

// Command is `kubectl approve` or `kubectl reject`.
func Command(verdict v1alpha1.Verdict, streams genericiooptions.IOStreams) *cobra.Command {
	o := &options{verdict: verdict, flags: genericclioptions.NewConfigFlags(true), streams: streams, in: bufio.NewReader(streams.In)}
	verb := o.verb()
	cmd := &cobra.Command{
		Use:   "kubectl " + verb + " joinrequest NAME...",
		Short: verb + " machines that wait to join",
		Long: "Shows what each machine asked, asks you, and writes your decision, which is final.\n\n" +
			"Exit codes: 0 done, 1 failed, 2 usage, 3 a right is missing, 4 the request changed or is decided the other way.",
		Example:      fmt.Sprintf("  kubectl %[1]s joinrequest jr-3kq7n2zv5mwa4yxd\n  kubectl %[1]s jr/jr-3kq7n2zv5mwa4yxd --message 'seen in the rack'\n  kubectl %[1]s jr -l join.better-compute.dev/attestor-type=tpm\n  kubectl %[1]s jr --all", verb),
		SilenceUsage: true, SilenceErrors: true,
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl " + verb},
		ValidArgsFunction: o.complete,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	f := cmd.Flags()
	o.flags.AddFlags(f)
	f.StringVarP(&o.selector, "selector", "l", "", "decide all undecided requests with these labels")
	f.BoolVar(&o.all, "all", false, "decide all undecided requests of the namespace")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	f.StringVarP(&o.message, "message", "m", "", "why, for others to read")
	if verdict == v1alpha1.VerdictApproved {
		f.StringVar(&o.pool, "pool", "", "approve into another pool of the tenant")
		f.StringVar(&o.tenant, "tenant", "", "claim an unassigned machine for this tenant")
	}
	f.StringVar(&o.dryRun, "dry-run", "none", "none, client (say what would be sent) or server (have the API server check it)")
	f.StringVarP(&o.output, "output", "o", "", "name, json or yaml")
	f.BoolVar(&o.wait, "wait", false, "wait until the decision is recorded")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait")
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	return cmd
}

// connect makes the client and finds the namespace.
func (o *options) connect() error {
	cfg, err := o.flags.ToRESTConfig()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1alpha1.AddToScheme, authenticationv1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	// The kinds are known, so nothing has to be discovered.
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(v1alpha1.GroupVersion.WithKind("JoinRequest"), meta.RESTScopeNamespace)
	mapper.Add(authenticationv1.SchemeGroupVersion.WithKind("SelfSubjectReview"), meta.RESTScopeRoot)
	if o.client, err = client.New(cfg, client.Options{Scheme: scheme, Mapper: mapper}); err != nil {
		return err
	}
	o.namespace, _, err = o.flags.ToRawKubeConfigLoader().Namespace()
	return err
}

func (o *options) run(ctx context.Context, args []string) error {
	names, err := o.names(args)
	if err != nil {
		return usageError{err}
	}
	if !slices.Contains([]string{"none", "client", "server"}, o.dryRun) {
		return usageError{fmt.Errorf("--dry-run is none, client or server, not %q", o.dryRun)}
	}
	if !slices.Contains([]string{"", "name", "json", "yaml"}, o.output) {
		return usageError{fmt.Errorf("--output is name, json or yaml, not %q", o.output)}
	}
	if err := o.connect(); err != nil {
		return err
	}
	requests, err := o.find(ctx, names)
	if err != nil {
		return err
	}
	if len(requests) == 0 {
		fmt.Fprintf(o.streams.ErrOut, "no undecided join requests in namespace %s\n", o.namespace)
		return nil
	}
	if o.all && !o.yes {
		if err := o.confirmCount(len(requests)); err != nil {
			return err
		}
	}
	me, err := o.whoAmI(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for i := range requests {
		if err := o.decide(ctx, &requests[i], me); err != nil {
			errs = append(errs, fmt.Errorf("joinrequest %s: %w", requests[i].Name, err))
		}
	}
	return errors.Join(errs...)
}

var resourceNames = []string{"joinrequest", "joinrequests", "jr", "joinrequest.join.better-compute.dev", "joinrequests.join.better-compute.dev"}

// names reads "joinrequest A B", "jr/A jr/B" and the forms without names.
func (o *options) names(args []string) ([]string, error) {
	selects := o.selector != "" || o.all
	if len(args) == 0 {
		return nil, fmt.Errorf("say what to %s: joinrequest NAME", o.verb())
	}
	var names []string
	if kind := args[0]; !strings.Contains(kind, "/") {
		if !slices.Contains(resourceNames, kind) {
			return nil, fmt.Errorf("kubectl %s decides about joinrequests, not %q", o.verb(), kind)
		}
		names = args[1:]
		if i := slices.IndexFunc(names, func(n string) bool { return strings.Contains(n, "/") }); i >= 0 {
			return nil, fmt.Errorf("%q: write either joinrequest NAME or joinrequest/NAME", names[i])
		}
	} else {
		for _, a := range args {
			kind, name, _ := strings.Cut(a, "/")
			if !slices.Contains(resourceNames, kind) || name == "" || strings.Contains(name, "/") {
				return nil, fmt.Errorf("%q is no joinrequest/NAME", a)
			}
			names = append(names, name)
		}
	}
	switch {
	case len(names) > 0 && selects:
		return nil, errors.New("give names, or --selector or --all, not both")
	case len(names) == 0 && !selects:
		return nil, errors.New("give a name, --selector or --all")
	}
	return names, nil
}

func (o *options) find(ctx context.Context, names []string) ([]v1alpha1.JoinRequest, error) {
	if len(names) > 0 {
		requests := make([]v1alpha1.JoinRequest, len(names))
		for i, name := range names {
			if err := o.client.Get(ctx, client.ObjectKey{Namespace: o.namespace, Name: name}, &requests[i]); err != nil {
				return nil, o.explain(err, "get", "joinrequests")
			}
		}
		return requests, nil
	}
	list := &v1alpha1.JoinRequestList{}
	opts := &client.ListOptions{Namespace: o.namespace, Raw: &metav1.ListOptions{LabelSelector: o.selector}}
	if err := o.client.List(ctx, list, opts); err != nil {
		return nil, o.explain(err, "list", "joinrequests")
	}
	return slices.DeleteFunc(list.Items, func(r v1alpha1.JoinRequest) bool { return r.Spec.Decision != nil }), nil
}

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

// decide shows one request, asks, and writes the decision.
func (o *options) decide(ctx context.Context, r *v1alpha1.JoinRequest, me v1alpha1.UserInfo) error {
	if d := r.Spec.Decision; d != nil {
		return o.decided(r, d)
	}
	decision := &v1alpha1.Decision{Verdict: o.verdict, DecidedBy: me, Message: o.message, Pool: o.pool, Tenant: o.tenant}
	if !o.yes && o.dryRun == "none" {
		show(o.streams.ErrOut, r)
		if err := o.confirm(r.Name); err != nil {
			return err
		}
	}
	if o.dryRun == "client" {
		r.Spec.Decision = decision
		return o.print(r, " (client dry run)")
	}
	patch, err := json.Marshal(map[string]any{
		// What changed since it was shown is a conflict.
		"metadata": map[string]any{"resourceVersion": r.ResourceVersion, "uid": r.UID},
		"spec":     map[string]any{"decision": decision},
	})
	if err != nil {
		return err
	}
	var opts []client.PatchOption
	suffix := ""
	if o.dryRun == "server" {
		opts, suffix = append(opts, client.DryRunAll), " (server dry run)"
	}
	opts = append(opts, client.FieldOwner("kubectl-"+o.verb()))
	if err := o.client.Patch(ctx, r, client.RawPatch(types.MergePatchType, patch), opts...); err != nil {
		return o.refused(ctx, r, err)
	}
	if o.wait && o.dryRun == "none" {
		if err := o.awaitRecorded(ctx, r); err != nil {
			return err
		}
	}
	return o.print(r, suffix)
}

// decided is a request that somebody decided before.
func (o *options) decided(r *v1alpha1.JoinRequest, d *v1alpha1.Decision) error {
	said := fmt.Sprintf("already %s by %s%s", strings.ToLower(string(d.Verdict)), printable(d.DecidedBy.Username), when(r))
	if d.Verdict != o.verdict {
		return conflictError{fmt.Errorf("%s; a decision is final", said)}
	}
	if o.output != "" {
		return o.print(r, "")
	}
	fmt.Fprintf(o.streams.Out, "joinrequest.%s/%s %s\n", v1alpha1.GroupVersion.Group, r.Name, said)
	return nil
}

// when is the time of a decision: that of the write that brought it.
func when(r *v1alpha1.JoinRequest) string {
	for _, f := range r.ManagedFields {
		if f.Subresource == "" && f.Time != nil && f.FieldsV1 != nil && strings.Contains(f.FieldsV1.GetRawString(), `"f:decision"`) {
			return " at " + f.Time.UTC().Format(time.RFC3339)
		}
	}
	if c := meta.FindStatusCondition(r.Status.Conditions, v1alpha1.ConditionRecorded); c != nil {
		return " at " + c.LastTransitionTime.UTC().Format(time.RFC3339)
	}
	return ""
}

// refused explains why the decision was not taken.
func (o *options) refused(ctx context.Context, r *v1alpha1.JoinRequest, err error) error {
	if apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
		var now v1alpha1.JoinRequest
		if getErr := o.client.Get(ctx, client.ObjectKeyFromObject(r), &now); getErr == nil && now.Spec.Decision != nil {
			return o.decided(&now, now.Spec.Decision)
		}
	}
	switch {
	case apierrors.IsConflict(err):
		return conflictError{errors.New("it changed since it was shown; look at it again and decide anew")}
	case apierrors.IsForbidden(err):
		pool := r.Spec.Pool
		if o.pool != "" {
			pool = o.pool
		}
		try := []string{fmt.Sprintf("kubectl auth can-i patch joinrequests.%s -n %s", v1alpha1.GroupVersion.Group, r.Namespace)}
		resource := "fleetpools." + v1alpha1.GroupVersion.Group
		if pool != "" {
			resource += "/" + pool
		}
		try = append(try, fmt.Sprintf("kubectl auth can-i approve %s -n %s", resource, r.Namespace))
		return forbiddenError{fmt.Errorf("%w\nTo %s it you need the verbs patch on joinrequests and approve on %s in namespace %s. Try:\n  %s",
			err, o.verb(), resource, r.Namespace, strings.Join(try, "\n  "))}
	}
	return err
}

func (o *options) explain(err error, verb, resource string) error {
	if apierrors.IsForbidden(err) {
		return forbiddenError{fmt.Errorf("%w\nTry:\n  kubectl auth can-i %s %s.%s -n %s", err, verb, resource, v1alpha1.GroupVersion.Group, o.namespace)}
	}
	return err
}

func (o *options) confirmCount(n int) error {
	if !interactive(o.streams.In) {
		return usageError{errors.New("--all asks for the number of requests; without a terminal give --yes")}
	}
	fmt.Fprintf(o.streams.ErrOut, "%d requests in namespace %s. To %s them all, type their number: ", n, o.namespace, o.verb())
	if line, _ := o.in.ReadString('\n'); strings.TrimSpace(line) != fmt.Sprint(n) {
		return errors.New("nothing was decided")
	}
	o.yes = true
	return nil
}

func (o *options) confirm(name string) error {
	if !interactive(o.streams.In) {
		return usageError{errors.New("there is no terminal to ask at; give --yes")}
	}
	verb := o.verb()
	fmt.Fprintf(o.streams.ErrOut, "%s%s %s? [y/N] ", strings.ToUpper(verb[:1]), verb[1:], name)
	line, _ := o.in.ReadString('\n')
	if a := strings.ToLower(strings.TrimSpace(line)); a != "y" && a != "yes" {
		return errors.New("nothing was decided")
	}
	return nil
}

func interactive(in io.Reader) bool {
	f, ok := in.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

// awaitRecorded waits until the manager has taken the decision over, or thrown it away.
func (o *options) awaitRecorded(ctx context.Context, r *v1alpha1.JoinRequest) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	uid := r.UID
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		err := o.client.Get(ctx, client.ObjectKeyFromObject(r), r)
		switch {
		case apierrors.IsNotFound(err) || (err == nil && r.UID != uid):
			return conflictError{errors.New("the decision was thrown away and the request is asked again: see its Events")}
		case err != nil && ctx.Err() == nil:
			return err
		case err == nil && meta.IsStatusConditionTrue(r.Status.Conditions, v1alpha1.ConditionRecorded):
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("not recorded within %s: kubectl describe joinrequest %s -n %s says why", o.timeout, r.Name, r.Namespace)
		}
	}
}

func (o *options) print(r *v1alpha1.JoinRequest, suffix string) error {
	r.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("JoinRequest"))
	switch o.output {
	case "json":
		return (&printers.JSONPrinter{}).PrintObj(r, o.streams.Out)
	case "yaml":
		return (&printers.YAMLPrinter{}).PrintObj(r, o.streams.Out)
	case "name":
		fmt.Fprintf(o.streams.Out, "joinrequest.%s/%s\n", v1alpha1.GroupVersion.Group, r.Name)
		return nil
	}
	fmt.Fprintf(o.streams.Out, "joinrequest.%s/%s %s%s\n", v1alpha1.GroupVersion.Group, r.Name, o.done(), suffix)
	return nil
}

// complete offers the undecided requests.
func (o *options) complete(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return []string{"joinrequest", "jr"}, cobra.ShellCompDirectiveNoFileComp
	}
	if err := o.connect(); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	requests, err := o.find(cmd.Context(), nil)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, r := range requests {
		if !slices.Contains(args, r.Name) {
			names = append(names, fmt.Sprintf("%s\t%s into %s", r.Name, r.Spec.Attestor, r.Spec.Pool))
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// show prints what was asked, what was proved and what was only claimed.
func show(w io.Writer, r *v1alpha1.JoinRequest) {
	line := func(k, v string) {
		if v != "" {
			fmt.Fprintf(w, "  %-22s %s\n", k+":", printable(v))
		}
	}
	fmt.Fprintf(w, "%s/%s, asked %s ago\n", r.Namespace, r.Name, time.Since(r.CreationTimestamp.Time).Round(time.Second))
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
}

// printable keeps control characters off a terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return '?'
		}
		return r
	}, s)
}
