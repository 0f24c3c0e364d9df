package joinrequest

// Limits cap the undecided requests that are shown as objects, so that etcd never
// fills. A request beyond them waits all the same, without an object.
type Limits struct {
	// Tenant and Source cap those of one namespace and of one network address.
	Tenant, Source int
	// Total caps all, of which Reserved of each namespace do not count.
	Total, Reserved int
	// TokenFactor times the uses that a token has left caps those of one token.
	TokenFactor int
}

// DefaultLimits are those of the design.
var DefaultLimits = Limits{Tenant: 500, Source: 500, Total: 5000, Reserved: 50, TokenFactor: 2}

// waiter is an undecided request by what the caps count.
type waiter struct{ id, namespace, source, token string }

// admit returns those of the capped requests, the oldest first, for which there
// is room beside those that are shown.
func (l Limits) admit(shown, capped []waiter, usesLeft map[string]int) []waiter {
	total := len(shown)
	namespaces, sources, tokens := map[string]int{}, map[string]int{}, map[string]int{}
	count := func(w waiter) {
		namespaces[w.namespace]++
		sources[w.source]++
		tokens[w.token]++
	}
	for _, w := range shown {
		count(w)
	}
	var out []waiter
	for _, w := range capped {
		switch {
		case total >= l.Total && namespaces[w.namespace] >= l.Reserved:
		case namespaces[w.namespace] >= l.Tenant:
		case w.source != "" && sources[w.source] >= l.Source:
		case w.token != "" && tokens[w.token] >= l.TokenFactor*usesLeft[w.token]:
		default:
			total++
			count(w)
			out = append(out, w)
		}
	}
	return out
}
