package gateway

import (
	"net/http"
	"net/netip"
	"strings"
)

// source is the machine's address: the connection's (which the PROXY protocol may
// have told, see Server) or, behind trusted hops, what the outermost of them wrote
// into X-Forwarded-For. What stands to the left of that anyone can send, so it is
// never looked at.
func source(r *http.Request, trustedHops int) netip.Addr {
	if trustedHops > 0 {
		if a, ok := forwarded(r.Header.Values("X-Forwarded-For"), trustedHops); ok {
			return a
		}
	}
	ap, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Addr{}
	}
	return plain(ap.Addr())
}

// forwarded is the hops-th address from the right of all the header's values.
func forwarded(values []string, hops int) (netip.Addr, bool) {
	for i := len(values) - 1; i >= 0; i-- {
		rest := values[i]
		for more := true; more; hops-- {
			var last string
			if j := strings.LastIndexByte(rest, ','); j >= 0 {
				rest, last = rest[:j], rest[j+1:]
			} else {
				last, more = rest, false
			}
			if hops > 1 {
				continue
			}
			last = strings.TrimSpace(last)
			if a, err := netip.ParseAddr(last); err == nil {
				return plain(a), true
			}
			if ap, err := netip.ParseAddrPort(last); err == nil {
				return plain(ap.Addr()), true // some proxies add the port
			}
			return netip.Addr{}, false
		}
	}
	return netip.Addr{}, false
}

// plain is an address as limits and the service know it: an IPv4 address as such,
// and no zone.
func plain(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// network is whom a limit counts together: one IPv4 address, or the /64 that one
// machine of IPv6 has at its disposal.
func network(a netip.Addr) netip.Prefix {
	bits := 64
	if a.Is4() {
		bits = 32
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{} // no address: all of those together
	}
	return p
}
