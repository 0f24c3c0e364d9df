package decide

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

// resourceNames are the words that kubectl takes for the kind.
var resourceNames = []string{"joinrequest", "joinrequests", "jr", "joinrequest.join.better-compute.dev", "joinrequests.join.better-compute.dev"}

// maxMessage is the schema's limit for spec.decision.message, in characters.
const maxMessage = 1024

// check finds what is wrong with the flags before anything is sent or asked.
func (o *options) check() error {
	if !slices.Contains([]string{"none", "client", "server"}, o.dryRun) {
		return fmt.Errorf("--dry-run is none, client or server, not %q", o.dryRun)
	}
	if _, err := labels.Parse(o.selector); err != nil {
		return fmt.Errorf("--selector: %w", err)
	}
	if utf8.RuneCountInString(o.message) > maxMessage || strings.ContainsFunc(o.message, unicode.IsControl) {
		return fmt.Errorf("--message is one line of at most %d characters", maxMessage)
	}
	if o.timeout <= 0 {
		return fmt.Errorf("--timeout is more than nothing, not %s", o.timeout)
	}
	if !o.yes && o.dryRun == "none" && !interactive(o.streams.In) {
		return fmt.Errorf("there is no terminal to ask at: give --yes to %s without being asked", o.verb())
	}
	return nil
}

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
	case slices.Contains(names, ""):
		return nil, errors.New("a name is empty")
	case len(names) > 0 && selects:
		return nil, errors.New("give names, or --selector or --all, not both")
	case len(names) == 0 && !selects:
		return nil, errors.New("give a name, --selector or --all")
	}
	return names, nil
}

// find reads the requests that are named; one that cannot be read does not stand in
// the way of the others.
func (o *options) find(ctx context.Context, names []string) (found []v1alpha1.JoinRequest, errs []error) {
	for _, name := range names {
		var r v1alpha1.JoinRequest
		if err := o.client.Get(ctx, client.ObjectKey{Namespace: o.namespace, Name: name}, &r); err != nil {
			errs = append(errs, fmt.Errorf("joinrequest %s: %w", name, o.unread(ctx, "get", err)))
			continue
		}
		found = append(found, r)
	}
	return found, errs
}

// undecided lists the requests that nobody decided about.
func (o *options) undecided(ctx context.Context) ([]v1alpha1.JoinRequest, error) {
	list := &v1alpha1.JoinRequestList{}
	opts := &client.ListOptions{Namespace: o.namespace, Raw: &metav1.ListOptions{LabelSelector: o.selector}}
	if err := o.client.List(ctx, list, opts); err != nil {
		return nil, o.unread(ctx, "list", err)
	}
	return slices.DeleteFunc(list.Items, func(r v1alpha1.JoinRequest) bool { return r.Spec.Decision != nil }), nil
}

func (o *options) unread(ctx context.Context, verb string, err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return o.forbidden(ctx, err, []right{{verb: verb, resource: "joinrequests", namespace: o.namespace}})
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w in namespace %s", err, o.namespace)
	}
	return err
}
