package decide

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

const noFiles = cobra.ShellCompDirectiveNoFileComp

// complete offers the kind, then the undecided requests, in the form that was begun.
func (o *options) complete(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	prefix := ""
	switch {
	case len(args) == 0 && !strings.Contains(begun, "/"):
		return []string{"joinrequest\tmachines that wait to join", "jr\tthe same, short"}, noFiles
	case o.all || o.selector != "":
		return nil, noFiles
	case strings.Contains(begun, "/"):
		kind, _, _ := strings.Cut(begun, "/")
		prefix = kind + "/"
	case strings.Contains(args[0], "/"):
		kind, _, _ := strings.Cut(args[0], "/")
		prefix = kind + "/"
	}
	if kind, _, _ := strings.Cut(prefix, "/"); kind != "" && !slices.Contains(resourceNames, kind) {
		return nil, noFiles
	}
	if err := o.connect(); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	requests, err := o.undecided(cmd.Context())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var choices []string
	for _, r := range requests {
		if name := prefix + r.Name; !slices.Contains(args, name) {
			choices = append(choices, fmt.Sprintf("%s\t%s into %s", printable(name), printable(r.Spec.Attestor), printable(r.Spec.Pool)))
		}
	}
	return choices, noFiles
}

// completeFlags offers what the flags take. Registering fails only for a flag that
// there is not.
func (o *options) completeFlags(cmd *cobra.Command) {
	fixed := func(choices ...string) cobra.CompletionFunc { return cobra.FixedCompletions(choices, noFiles) }
	for name, choices := range map[string]cobra.CompletionFunc{
		"output": fixed("name", "json", "yaml"), "dry-run": fixed("none", "client", "server"), "pool": o.pools,
		"message": fixed(), "selector": fixed(), "tenant": fixed(), "timeout": fixed(),
	} {
		if cmd.Flags().Lookup(name) == nil {
			continue
		}
		if err := cmd.RegisterFlagCompletionFunc(name, choices); err != nil {
			panic(err)
		}
	}
}

// pools offers the pools that a request can be approved into.
func (o *options) pools(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	if err := o.connect(); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	namespace := o.namespace
	if o.tenant != "" {
		namespace = o.tenant
	}
	list := &v1alpha1.FleetPoolList{}
	if err := o.client.List(cmd.Context(), list, client.InNamespace(namespace)); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	choices := make([]string, len(list.Items))
	for i, p := range list.Items {
		choices[i] = p.Name
	}
	return choices, noFiles
}
