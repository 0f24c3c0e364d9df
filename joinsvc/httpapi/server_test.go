package httpapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

const gatewayURI = "spiffe://test.join.example/system/gateway"

// authority is a CA of a test.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(tb testing.TB) authority {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(tb, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "internal"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(tb, err)
	cert, err := x509.ParseCertificate(der)
	must(tb, err)
	return authority{cert, key}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// issue makes a certificate and its key in PEM.
func (a authority) issue(tb testing.TB, edit func(*x509.Certificate)) (cert, key []byte) {
	tb.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(tb, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	edit(template)
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, private.Public(), a.key)
	must(tb, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	must(tb, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

func serving(c *x509.Certificate) {
	c.IPAddresses, c.ExtKeyUsage = []net.IP{net.IPv4(127, 0, 0, 1)}, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
}

func gateway(c *x509.Certificate) {
	u, err := url.Parse(gatewayURI)
	if err != nil {
		panic(err)
	}
	c.URIs, c.ExtKeyUsage = []*url.URL{u}, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
}

// mounted is a folder like that of a mounted Secret.
type mounted string

func (m mounted) write(tb testing.TB, a, clients authority) {
	tb.Helper()
	cert, key := a.issue(tb, serving)
	for name, b := range map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: clients.cert.Raw})} {
		must(tb, os.WriteFile(filepath.Join(string(m), name), b, 0o600))
	}
}

// served is a server under way.
type served struct {
	tb    testing.TB
	addr  string
	ca    authority
	files *TLSFiles
	stop  context.CancelFunc
	done  chan error
}

func serve(tb testing.TB, handler http.Handler, dir mounted, ca authority, readTimeout time.Duration) *served {
	tb.Helper()
	log := slog.New(slog.DiscardHandler)
	files, err := OpenTLS(string(dir), "", gatewayURI, log)
	must(tb, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(tb, err)
	ctx, stop := context.WithCancel(context.Background())
	s := &served{tb, l.Addr().String(), ca, files, stop, make(chan error, 1)}
	go func() {
		s.done <- (&Server{Handler: handler, Files: files, Logger: log, ReadTimeout: readTimeout}).Serve(ctx, l)
	}()
	tb.Cleanup(stop)
	return s
}

// clientTLS is a client that shows a certificate by ca; without one where edit is nil.
func clientTLS(tb testing.TB, trusts, ca authority, edit func(*x509.Certificate)) *tls.Config {
	tb.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(trusts.cert)
	cfg := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	if edit != nil {
		pair, err := tls.X509KeyPair(ca.issue(tb, edit))
		must(tb, err)
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg
}

func (s *served) client(cfg *tls.Config) *http.Client {
	transport := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}
	s.tb.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 20 * time.Second}
}

func (s *served) get(c *http.Client) error {
	resp, err := c.Get("https://" + s.addr + "/healthz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return nil
}

// TestOnlyTheGatewayIsLetIn tries certificates that come close.
func TestOnlyTheGatewayIsLetIn(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	dir := mounted(t.TempDir())
	dir.write(t, ca, ca)
	s := serve(t, scripted(t, script{}, nil), dir, ca, 0)
	if err := s.get(s.client(clientTLS(t, ca, ca, gateway))); err != nil {
		t.Fatalf("the gateway: %v", err)
	}
	withURI := func(text string) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			gateway(c)
			u, err := url.Parse(text)
			must(t, err)
			c.URIs = []*url.URL{u}
		}
	}
	for name, cfg := range map[string]*tls.Config{
		"no certificate":       clientTLS(t, ca, ca, nil),
		"of another CA":        clientTLS(t, ca, other, gateway),
		"for servers":          clientTLS(t, ca, ca, func(c *x509.Certificate) { gateway(c); c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }),
		"ran out":              clientTLS(t, ca, ca, func(c *x509.Certificate) { gateway(c); c.NotAfter = time.Now().Add(-time.Minute) }),
		"no URI":               clientTLS(t, ca, ca, func(c *x509.Certificate) { gateway(c); c.URIs, c.DNSNames = nil, []string{gatewayURI} }),
		"a node's":             clientTLS(t, ca, ca, withURI("spiffe://test.join.example/tenant/t/node/n-1")),
		"longer":               clientTLS(t, ca, ca, withURI(gatewayURI+"/x")),
		"another trust domain": clientTLS(t, ca, ca, withURI("spiffe://other/system/gateway")),
		"two URIs": clientTLS(t, ca, ca, func(c *x509.Certificate) {
			gateway(c)
			c.URIs = append(c.URIs, &url.URL{Scheme: "spiffe", Host: "test.join.example", Path: "/x"})
		}),
		"TLS 1.2": func() *tls.Config { c := clientTLS(t, ca, ca, gateway); c.MaxVersion = tls.VersionTLS12; return c }(),
	} {
		t.Run(name, func(t *testing.T) {
			if err := s.get(s.client(cfg)); err == nil {
				t.Error("let in")
			}
		})
	}
}

// TestNewCertificateFilesAreUsedWithoutARestart also spoils them on the way.
func TestNewCertificateFilesAreUsedWithoutARestart(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	dir := mounted(t.TempDir())
	dir.write(t, old, old)
	s := serve(t, scripted(t, script{}, nil), dir, old, 0)
	must(t, s.get(s.client(clientTLS(t, old, old, gateway))))
	// Between two writes: a certificate without its key.
	cert, _ := next.issue(t, serving)
	must(t, os.WriteFile(filepath.Join(string(dir), "tls.crt"), cert, 0o600))
	if err := s.files.reload(); err == nil {
		t.Error("a certificate without its key was taken")
	}
	must(t, s.get(s.client(clientTLS(t, old, old, gateway))))
	dir.write(t, next, next)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.files.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := s.get(s.client(clientTLS(t, next, next, gateway)))
		if err == nil {
			break
		}
		if time.Since(begun) > 10*time.Second {
			t.Fatal(err)
		}
	}
	if err := s.get(s.client(clientTLS(t, next, old, gateway))); err == nil {
		t.Error("a certificate of the old CA is still let in")
	}
}

func TestFilesThatAreMissingAtTheStartAreAnError(t *testing.T) {
	if _, err := OpenTLS(t.TempDir(), "", gatewayURI, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("no error")
	}
}

// TestASlowBodyIsCutOff sends a byte now and then, as if for ever.
func TestASlowBodyIsCutOff(t *testing.T) {
	ca := newAuthority(t)
	dir := mounted(t.TempDir())
	dir.write(t, ca, ca)
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		t.Error("it reached the service")
		return &wire.Answer{}, nil
	}}, nil)
	const timeout = 300 * time.Millisecond
	s := serve(t, h, dir, ca, timeout)
	conn, err := tls.Dial("tcp", s.addr, clientTLS(t, ca, ca, gateway))
	must(t, err)
	defer conn.Close()
	must(t, conn.SetDeadline(time.Now().Add(20*time.Second)))
	body := envelope(t)
	begun := time.Now()
	_, err = fmt.Fprintf(conn, "POST /v1/join HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", len(body))
	must(t, err)
	go func() {
		for _, b := range []byte(body) {
			if _, err := conn.Write([]byte{b}); err != nil {
				return
			}
			time.Sleep(timeout / 4)
		}
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(t, err)
	defer resp.Body.Close()
	var p wire.Problem
	must(t, json.NewDecoder(resp.Body).Decode(&p))
	if p.Code != wire.InvalidInput || p.Detail != "body: did not come in time" || !resp.Close {
		t.Errorf("answered %+v, closing: %t", p, resp.Close)
	}
	if took := time.Since(begun); took < timeout || took > 10*timeout {
		t.Errorf("after %v", took)
	}
}

// TestJoinsUnderWayAreFinishedAtTheEnd stops a server with a join in its hands.
func TestJoinsUnderWayAreFinishedAtTheEnd(t *testing.T) {
	ca := newAuthority(t)
	dir := mounted(t.TempDir())
	dir.write(t, ca, ca)
	begun, finish := make(chan struct{}), make(chan struct{})
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		close(begun)
		<-finish
		return &wire.Answer{Outcome: wire.OutcomePending}, nil
	}}, nil)
	s := serve(t, h, dir, ca, 0)
	client := s.client(clientTLS(t, ca, ca, gateway))
	got := make(chan error, 1)
	go func() {
		resp, err := client.Post("https://"+s.addr+wire.PathJoin, wire.MediaTypeJSON, strings.NewReader(envelope(t)))
		if err == nil {
			defer resp.Body.Close()
			var body []byte
			if body, err = io.ReadAll(resp.Body); err == nil && (resp.StatusCode != http.StatusOK || !bytes.HasPrefix(body, []byte(wire.TypeJoin))) {
				err = fmt.Errorf("%d %s", resp.StatusCode, body)
			}
		}
		got <- err
	}()
	<-begun
	s.stop()
	for dialled := time.Now(); ; time.Sleep(5 * time.Millisecond) { // until nobody new is let in
		conn, err := net.Dial("tcp", s.addr)
		if err != nil {
			break
		}
		_ = conn.Close()
		if time.Since(dialled) > 10*time.Second {
			t.Fatal("it still listens")
		}
	}
	select {
	case err := <-s.done:
		t.Fatalf("it ended before the join: %v", err)
	default:
	}
	close(finish)
	must(t, <-got)
	must(t, <-s.done)
}
