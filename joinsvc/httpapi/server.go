package httpapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"
)

const (
	headerTimeout = 5 * time.Second
	// readTimeout bounds a request with its body: who sends a byte a second gets no
	// further.
	readTimeout  = 10 * time.Second
	writeTimeout = 30 * time.Second
	idleTimeout  = 2 * time.Minute
	maxHeader    = 16 << 10
	// drain is for how long joins under way are finished when the process ends.
	drain = 20 * time.Second
	// reloadEvery is how soon new certificate files are used.
	reloadEvery = 2 * time.Second
)

// TLSFiles are the files of a mounted Secret, read anew when they change.
type TLSFiles struct {
	// Cert and Key are what the service shows; ClientCA is who may vouch for the
	// gateway. All are PEM.
	Cert, Key, ClientCA string
	// GatewayURI is the one URI SAN that the gateway's certificate has.
	GatewayURI string

	log     *slog.Logger
	current atomic.Pointer[loadedTLS]
}

type loadedTLS struct {
	cert, key, ca []byte
	config        *tls.Config
}

// OpenTLS reads tls.crt, tls.key and, unless clientCA names another file, ca.crt
// from a folder.
func OpenTLS(dir, clientCA, gatewayURI string, log *slog.Logger) (*TLSFiles, error) {
	if clientCA == "" {
		clientCA = filepath.Join(dir, "ca.crt")
	}
	f := &TLSFiles{
		Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), ClientCA: clientCA, GatewayURI: gatewayURI, log: log,
	}
	return f, f.reload()
}

// reload takes the files if they changed. It takes all or nothing.
func (f *TLSFiles) reload() error {
	var next loadedTLS
	for _, file := range []struct {
		path string
		into *[]byte
	}{{f.Cert, &next.cert}, {f.Key, &next.key}, {f.ClientCA, &next.ca}} {
		b, err := os.ReadFile(file.path)
		if err != nil {
			return fmt.Errorf("serving certificate: %w", err)
		}
		*file.into = b
	}
	if old := f.current.Load(); old != nil && slices.Equal(old.cert, next.cert) && slices.Equal(old.key, next.key) && slices.Equal(old.ca, next.ca) {
		return nil
	}
	pair, err := tls.X509KeyPair(next.cert, next.key)
	if err != nil {
		return fmt.Errorf("serving certificate: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(next.ca) {
		return fmt.Errorf("serving certificate: %s holds no certificate", f.ClientCA)
	}
	next.config = &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients, VerifyConnection: f.verify,
		// One connection carries many joins, so HTTP/2 and resumption gain nothing.
		NextProtos: []string{"http/1.1"}, SessionTicketsDisabled: true,
	}
	f.current.Store(&next)
	return nil
}

// verify lets in the gateway and nobody else whom the same CA vouches for.
func (f *TLSFiles) verify(state tls.ConnectionState) error {
	if len(state.VerifiedChains) == 0 || len(state.PeerCertificates) == 0 {
		return errors.New("no verified client certificate")
	}
	if uris := state.PeerCertificates[0].URIs; len(uris) != 1 || uris[0].String() != f.GatewayURI {
		return errors.New("the client certificate is not the gateway's")
	}
	return nil
}

// Config is the TLS configuration of a server: each connection takes the files of
// its time.
func (f *TLSFiles) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.current.Load().config, nil },
	}
}

// Run follows the files until ctx ends. Files that cannot be used, as between the
// two writes of a rotation, keep the last good ones.
func (f *TLSFiles) Run(ctx context.Context) {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	said := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		before := f.current.Load()
		err := f.reload()
		switch {
		case err != nil && err.Error() != said:
			said = err.Error()
			f.log.Error("the certificate files cannot be used; the last good ones stay", "error", err)
		case err == nil:
			said = ""
			if f.current.Load() != before {
				f.log.Info("took new certificate files", "file", f.Cert)
			}
		}
	}
}

// Server serves a handler to the gateway.
type Server struct {
	Handler http.Handler
	Files   *TLSFiles
	Logger  *slog.Logger
	// ReadTimeout bounds a request with its body; zero takes the default of 10 s.
	ReadTimeout time.Duration
}

// Serve serves on l until ctx ends, then finishes what is under way.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	timeout := s.ReadTimeout
	if timeout == 0 {
		timeout = readTimeout
	}
	server := &http.Server{
		Handler: s.Handler, TLSConfig: s.Files.Config(), Protocols: &protocols,
		ReadHeaderTimeout: min(headerTimeout, timeout), ReadTimeout: timeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- server.ServeTLS(l, "", "") }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	if err := server.Shutdown(end); err != nil {
		return errors.Join(fmt.Errorf("joins under way were cut off: %w", err), server.Close())
	}
	return nil
}
