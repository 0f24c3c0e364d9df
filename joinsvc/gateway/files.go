package gateway

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// fileAge is how long a new certificate may go unnoticed.
const fileAge = 5 * time.Second

// KeyPair is a certificate and key of a folder (tls.crt, tls.key) that are read
// again when they change. A pair that does not match keeps the last good one.
type KeyPair struct {
	dir     string
	mu      sync.Mutex
	pair    *tls.Certificate
	checked time.Time
	changed time.Time
}

// OpenKeyPair reads a folder.
func OpenKeyPair(dir string) (*KeyPair, error) {
	k := &KeyPair{dir: dir}
	if _, err := k.get(); err != nil {
		return nil, err
	}
	return k, nil
}

func (k *KeyPair) get() (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.pair != nil && time.Since(k.checked) < fileAge {
		return k.pair, nil
	}
	k.checked = time.Now()
	crt := filepath.Join(k.dir, "tls.crt")
	st, err := os.Stat(crt)
	if err == nil && k.pair != nil && st.ModTime().Equal(k.changed) {
		return k.pair, nil
	}
	pair, err := tls.LoadX509KeyPair(crt, filepath.Join(k.dir, "tls.key"))
	if err != nil {
		if k.pair != nil {
			return k.pair, nil
		}
		return nil, fmt.Errorf("certificate of %s: %w", k.dir, err)
	}
	k.pair = &pair
	if st != nil {
		k.changed = st.ModTime()
	}
	return k.pair, nil
}

// Server is a TLS configuration that serves the pair.
func (k *KeyPair) Server() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return k.get() }}
}

// Client is a TLS configuration that shows the pair to servers under a CA.
func (k *KeyPair) Client(caFile string) (*tls.Config, error) {
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", caFile)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: roots,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return k.get() },
	}, nil
}
