package gateway

import (
	"net/http"
	"strings"

	"github.com/better-compute/join-operator/api/wire"
)

// Health endpoints, which the gateway answers itself.
const (
	pathHealthz = "/healthz"
	pathReadyz  = "/readyz"
)

// budget is what a request is weighed against.
type budget int

const (
	// byRefusals: joins and confirmations cost nothing unless they are refused.
	byRefusals budget = iota
	// byRequests: renewals, polls and downloads cost one each, from a bucket of
	// their own, so that refused joins behind an address do not stop them.
	byRequests
	// free: health, which is answered here.
	free
)

// route is one endpoint of the protocol; name is its metric label.
type route struct {
	name   string
	method string
	budget budget
	// query says that the endpoint has one; others' is dropped.
	query bool
}

// allows says whether an endpoint has a method. Who may GET may HEAD.
func (rt route) allows(method string) bool {
	return method == rt.method || (rt.method == http.MethodGet && method == http.MethodHead)
}

// allow is the value of the Allow header.
func (rt route) allow() string {
	if rt.method == http.MethodGet {
		return http.MethodGet + ", " + http.MethodHead
	}
	return rt.method
}

// unknown is what is not of the protocol.
var unknown = route{name: "unknown"}

// routeOf finds an endpoint by its decoded path.
func routeOf(path string) (route, bool) {
	switch path {
	case wire.PathJoin:
		return route{name: "join", method: http.MethodPost}, true
	case wire.PathConfirm:
		return route{name: "confirm", method: http.MethodPost}, true
	case wire.PathRenew:
		return route{name: "renew", method: http.MethodPost, budget: byRequests}, true
	case wire.PathCommands:
		return route{name: "commands", method: http.MethodPost, budget: byRequests}, true
	case wire.PathBundle:
		return route{name: "bundle", method: http.MethodGet, budget: byRequests}, true
	case wire.PathRotations:
		return route{name: "rotations", method: http.MethodGet, budget: byRequests, query: true}, true
	case wire.PathCRL:
		return route{name: "crl", method: http.MethodGet, budget: byRequests}, true
	case pathHealthz, pathReadyz:
		return route{name: "health", method: http.MethodGet, budget: free}, true
	}
	if ski, ok := strings.CutPrefix(path, wire.PathCRL+"/"); ok && isHex(ski) {
		return route{name: "crl", method: http.MethodGet, budget: byRequests}, true
	}
	return unknown, false
}

// isHex says whether s is a subject key identifier in lower-case hexadecimal.
func isHex(s string) bool {
	if s == "" || len(s) > 128 || len(s)%2 != 0 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
