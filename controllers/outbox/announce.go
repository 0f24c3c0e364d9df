package outbox

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"

	"github.com/better-compute/join-operator/api/v1alpha1"
)

const (
	// announceEvery bounds the Events about one object for one cause: the first
	// comes at once, what follows is counted and told together.
	announceEvery = 10 * time.Second
	// announceKeys bounds the memory for what is counted.
	announceKeys = 1000
	// maxReason leaves a reason room in an Event's action, of 128 characters.
	maxReason = 100

	actionJoin = "Join"
)

// Announcer tells people, by Kubernetes Events, which machines a token admitted
// and which were refused and why. It is an [Observer].
type Announcer struct {
	DB       *pgxpool.Pool
	Recorder events.EventRecorder
	Logger   *slog.Logger
	// Now is the time by which Events are spaced; time.Now by default.
	Now func() time.Time

	told map[cause]*tally
}

// cause is what is told together: one object and one reason.
type cause struct {
	object corev1.ObjectReference
	reason string // "joined", or a refusal's "<attestor>:<reason>"
}

type tally struct {
	last  time.Time
	count int
	event Event // the newest
}

// Observe takes the events in and tells what is due.
func (a *Announcer) Observe(ctx context.Context, batch []Event) error {
	if a.told == nil {
		a.told = map[cause]*tally{}
	}
	if a.Now == nil {
		a.Now = time.Now
	}
	tokens, err := Tokens(ctx, a.DB, batch)
	if err != nil {
		return err
	}
	dropped := 0
	for _, e := range batch {
		c, ok := causeOf(e, tokens)
		if !ok {
			continue
		}
		t := a.told[c]
		if t == nil {
			if len(a.told) >= announceKeys {
				dropped++
				continue
			}
			t = &tally{}
			a.told[c] = t
		}
		t.count++
		t.event = e
	}
	if dropped > 0 {
		a.Logger.WarnContext(ctx, "too many different causes at once: their Events were left out; the events are in the database", "count", dropped)
	}
	now := a.Now()
	for c, t := range a.told {
		switch {
		case now.Sub(t.last) < announceEvery:
		case t.count == 0:
			delete(a.told, c)
		default:
			a.tell(c, t)
			t.last, t.count = now, 0
		}
	}
	return nil
}

func (a *Announcer) tell(c cause, t *tally) {
	if c.reason == causeJoined {
		if t.count == 1 {
			a.Recorder.Eventf(&c.object, nodeReference(t.event), corev1.EventTypeNormal, v1alpha1.ReasonJoined, actionJoin,
				"Machine joined as FleetNode %s", t.event.NodeID)
			return
		}
		a.Recorder.Eventf(&c.object, nil, corev1.EventTypeNormal, v1alpha1.ReasonJoined, actionJoin, "%d machines joined", t.count)
		return
	}
	who := "A machine was refused"
	if t.count > 1 {
		who = fmt.Sprintf("%d machines or attempts were refused", t.count)
	}
	// The recorder counts Events of one object, reason and action as one and
	// keeps the first note: the action tells refusals apart.
	a.Recorder.Eventf(&c.object, nil, corev1.EventTypeWarning, v1alpha1.ReasonRefused, "Refuse/"+c.reason, "%s", who+": "+explain(c, t.event))
}

const causeJoined = "joined"

// causeOf returns what an event is told under, and false where it is none of
// this announcer's.
func causeOf(e Event, tokens map[string]TokenRef) (cause, bool) {
	token, named := tokens[e.TokenID()]
	switch e.Type {
	case "node.joined":
		if !named || token.Namespace != e.Tenant {
			return cause{}, false
		}
		return cause{tokenReference(token), causeJoined}, true
	case "security.join.refused":
		reason := refusalOf(e).Reason
		if reason == "" {
			reason = "unknown"
		}
		reason = reason[:min(len(reason), maxReason)]
		if named && token.Namespace == e.Tenant {
			return cause{tokenReference(token), reason}, true
		}
		return cause{namespaceReference(e.Tenant), reason}, true
	}
	return cause{}, false
}

type refusal struct {
	Reason    string `json:"reason"`
	CSRSHA256 string `json:"csrSHA256"`
	Detail    string `json:"detail"`
}

func refusalOf(e Event) refusal {
	var r refusal
	// What does not parse is told without its details.
	_ = json.Unmarshal(e.Data, &r)
	return r
}

// explain says why, in which object, and what to do.
func explain(c cause, e Event) string {
	r := refusalOf(e)
	var b strings.Builder
	b.WriteString(c.reason + ". ")
	if r.Detail != "" {
		// The verifier knows best.
		b.WriteString(strings.TrimSuffix(r.Detail, ".") + ".")
	} else {
		b.WriteString(fixFor(c))
	}
	if r.CSRSHA256 != "" {
		b.WriteString(" CSR " + r.CSRSHA256 + ".")
	}
	const most = 1024 // an Event's note
	text := b.String()
	if len(text) > most-64 {
		text = strings.ToValidUTF8(text[:most-64], "") + "…"
	}
	return text
}

// fixFor says what a person may do about a refusal.
func fixFor(c cause) string {
	name := c.object.Name
	_, reason, _ := strings.Cut(c.reason, ":")
	if c.object.Kind != "JoinToken" {
		switch reason {
		case "malformed":
			return "What the machine sent is no token: it was cut or changed on its way. Copy it anew from its Secret."
		case "unknown":
			return "No JoinToken that exists has this token. Give the machine the token of one that does."
		}
		return "The event in the database says more."
	}
	switch {
	case reason == "spent", reason == "reused":
		return fmt.Sprintf("Every use of JoinToken %s is spent: raise its spec.uses, or make another JoinToken.", name)
	case reason == "expired":
		return fmt.Sprintf("JoinToken %s has expired: move its spec.expiresAt, or make another JoinToken.", name)
	case reason == "revoked":
		return fmt.Sprintf("JoinToken %s was deleted: make another JoinToken.", name)
	case strings.Contains(reason, "role"):
		return fmt.Sprintf("JoinToken %s admits another role: compare its spec.role with what the machine asks for.", name)
	case strings.HasPrefix(reason, "expect"):
		return fmt.Sprintf("JoinToken %s is bound to another machine: compare its spec.expect with the machine.", name)
	case strings.Contains(reason, "enrolled"), strings.Contains(reason, "reclaim"):
		return fmt.Sprintf("The machine is enrolled already: delete its FleetNode, or make a JoinToken with spec.allowReclaim instead of %s.", name)
	case strings.Contains(reason, "pool"):
		return fmt.Sprintf("See spec.pool of JoinToken %s: the FleetPool must exist.", name)
	case strings.Contains(reason, "rejected"):
		return "A person rejected this machine's JoinRequest."
	}
	return fmt.Sprintf("See JoinToken %s.", name)
}

func tokenReference(t TokenRef) corev1.ObjectReference {
	return corev1.ObjectReference{
		APIVersion: v1alpha1.GroupVersion.String(), Kind: "JoinToken",
		Namespace: t.Namespace, Name: t.Name, UID: t.UID,
	}
}

// namespaceReference stands for a tenant as a whole. It carries its own name as
// namespace, so that its Events lie where the tenant's people look.
func namespaceReference(name string) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Namespace: name, Name: name}
}

func nodeReference(e Event) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: v1alpha1.GroupVersion.String(), Kind: "FleetNode",
		Namespace: e.Tenant, Name: e.NodeID,
	}
}
