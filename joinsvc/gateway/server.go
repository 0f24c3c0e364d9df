package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	proxyproto "github.com/pires/go-proxyproto"
)

const (
	headerTimeout = 5 * time.Second
	// readTimeout bounds a request with its body: who sends a byte a second gets no
	// further.
	readTimeout = 10 * time.Second
	// writeTimeout runs from the end of the header: it covers reading, both tries and
	// the answer.
	writeTimeout = 45 * time.Second
	// idleTimeout is short: an agent that joined has nothing more to say.
	idleTimeout = 15 * time.Second
	maxHeader   = 8 << 10
	// drain is for how long requests under way are finished when the process ends.
	drain = 20 * time.Second
)

// Server serves a Handler to machines.
type Server struct {
	Handler  *Handler
	Identity *Identity
	// ProxyProtocol are the networks of proxies that speak the PROXY protocol. From
	// there it is required, from elsewhere it is not understood.
	ProxyProtocol []netip.Prefix
	// MaxConnections bounds open connections; those that come then wait to be
	// accepted. MaxConnectionsPerSource bounds those of one source, and further ones
	// are closed; it does not apply where proxies stand in front.
	MaxConnections, MaxConnectionsPerSource int
	// ShutdownDelay is how long it goes on after it began to say that it is not
	// ready.
	ShutdownDelay time.Duration
	// ReadTimeout bounds a request with its body; zero takes the default of 10 s.
	ReadTimeout time.Duration
	Logger      *slog.Logger
}

// Serve serves on l until ctx ends, then finishes what is under way.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	if s.MaxConnections < 1 {
		return errors.New("the gateway takes at least one connection")
	}
	perSource := s.MaxConnectionsPerSource
	if len(s.ProxyProtocol) > 0 || s.Handler.cfg.TrustedHops > 0 {
		perSource = 0
	}
	l = newCapped(l, s.MaxConnections, perSource)
	if len(s.ProxyProtocol) > 0 {
		l = proxied(l, s.ProxyProtocol)
	}
	// HTTP/1.1 alone: an agent sends one request at a time, and HTTP/2 costs more on
	// each connection.
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	read := cmp.Or(s.ReadTimeout, readTimeout)
	server := &http.Server{
		Handler: s.Handler, TLSConfig: s.Identity.server(), Protocols: protocols,
		ReadHeaderTimeout: min(headerTimeout, read), ReadTimeout: read, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug), // strangers' broken handshakes
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ServeTLS(l, "", "") }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	s.Handler.Drain()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-time.After(s.ShutdownDelay):
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	if err := server.Shutdown(end); err != nil {
		return errors.Join(fmt.Errorf("requests under way were cut off: %w", err), server.Close())
	}
	return nil
}

// proxied takes machines' addresses from the PROXY protocol's header.
func proxied(l net.Listener, from []netip.Prefix) net.Listener {
	return &proxyproto.Listener{
		Listener: l, ReadHeaderTimeout: headerTimeout,
		ConnPolicy: func(o proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) {
			peer := remote(o.Upstream)
			for _, p := range from {
				if p.Contains(peer) {
					return proxyproto.REQUIRE, nil
				}
			}
			return proxyproto.SKIP, nil
		},
	}
}

// remote is the address of a TCP peer.
func remote(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return plain(tcp.AddrPort().Addr())
	}
	return netip.Addr{}
}
