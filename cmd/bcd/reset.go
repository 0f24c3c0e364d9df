package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/better-compute/join-operator/agent/state"
)

type resetFlags struct {
	stateDir, output string
	yes, bundle      bool
}

func newResetCommand(s streams) *cobra.Command {
	var f resetFlags
	cmd := &cobra.Command{
		Use:   "reset",
		Short: "Forget this machine's identity and key, to join as a new node",
		Long: `Forget this machine's identity, key and request, so that it can join as a new node.
It is for a machine whose node was retired or deleted, and for a copy of another
machine's disk: nothing is sent, so that the node it was copied from is not
harmed. The pinned bundle stays unless --bundle is given.

Copies that --key-out and the like made are left where they are, until the next
join writes over them.`,
		RunE: func(*cobra.Command, []string) error { return f.run(s) },
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVar(&f.stateDir, "state-dir", defaultStateDir, "directory of the key, the request, the pinned bundle and the identity")
	fl.BoolVar(&f.yes, "yes", false, "do it")
	fl.BoolVar(&f.bundle, "bundle", false, "forget the pinned bundle too")
	fl.StringVar(&f.output, "output", "text", "form of the result on the standard output: text or json")
	return cmd
}

// resetResult is the result of "bcd reset --output json".
type resetResult struct {
	// Outcome is reset, or the name of an exit code.
	Outcome string `json:"outcome"`
	// Node is the node that is left behind, where there was one that could be read.
	Node *shownIdentity `json:"node,omitempty"`
}

func (f *resetFlags) run(s streams) error {
	if f.output != "text" && f.output != "json" {
		return usageError("--output must be text or json")
	}
	if _, err := state.View(f.stateDir); errors.Is(err, fs.ErrNotExist) {
		return f.print(s, resetResult{Outcome: outcome(exitNotJoined)}, fmt.Sprintf("there is nothing to forget: no %s\n", f.stateDir))
	}
	dir, err := state.Open(f.stateDir)
	if errors.Is(err, state.ErrLocked) {
		return fmt.Errorf("%w: stop it first, as with systemctl stop bcd", err)
	}
	if err != nil {
		return localError{err}
	}
	defer dir.Close()
	id, err := dir.Identity()
	if err != nil {
		id = nil // None yet, or one that cannot be read: it goes all the same.
	}
	if !f.yes {
		if id == nil {
			return usageError("this forgets the key and the request of this machine, for good: say --yes")
		}
		return usageError(fmt.Sprintf("this forgets the key and the certificate of node %s in tenant %s, for good: say --yes", id.NodeID, id.Tenant))
	}
	if err := dir.Reset(f.bundle); err != nil {
		return localError{err}
	}
	r := resetResult{Outcome: "reset"}
	text := "forgotten: the next join is with a new key\n"
	if id != nil {
		r.Node = shown(id)
		text = fmt.Sprintf(`forgotten: the next join is with a new key, as a new node
node %[1]s of tenant %[2]s is left behind. Unless another machine is that node, an operator should
  retire it  kubectl patch fleetnode %[1]s --namespace %[2]s --type merge --patch '{"spec":{"retired":true}}'
  or delete it  kubectl delete fleetnode %[1]s --namespace %[2]s
`, id.NodeID, id.Tenant)
	}
	return f.print(s, r, text)
}

func (f *resetFlags) print(s streams, r resetResult, text string) error {
	var err error
	if f.output == "json" {
		err = printJSON(s.out, r)
	} else {
		_, err = fmt.Fprint(s.out, text)
	}
	if err != nil {
		return localError{err}
	}
	return nil
}
