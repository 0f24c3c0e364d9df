package state_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/agent/state"
)

const lockEnv = "JOIN_TEST_LOCK"

// TestMain is another process in the test of the lock, and a test elsewhere.
func TestMain(m *testing.M) {
	path := os.Getenv(lockEnv)
	if path == "" {
		os.Exit(m.Run())
	}
	if _, err := state.Open(path); errors.Is(err, state.ErrLocked) {
		os.Exit(8)
	} else if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

func open(t *testing.T, path string) *state.Dir {
	t.Helper()
	d, err := state.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// TestOneProcessAtATime tries from another process and from this one.
func TestOneProcessAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	d := open(t, path)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	other := func() int {
		cmd := exec.CommandContext(t.Context(), self)
		cmd.Env = append(os.Environ(), lockEnv+"="+path)
		_ = cmd.Run()
		return cmd.ProcessState.ExitCode()
	}
	if code := other(); code != 8 {
		t.Errorf("another process got exit code %d while the directory was locked", code)
	}
	if _, err := state.Open(path); !errors.Is(err, state.ErrLocked) {
		t.Errorf("a second opening: %v", err)
	}
	if _, err := state.View(path); err != nil {
		t.Errorf("a view beside the lock: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if code := other(); code != 0 {
		t.Errorf("exit code %d after the lock was given back", code)
	}
}

// TestRequestIsMadeOnceForEachKindOfKey and is the same ever after.
func TestRequestIsMadeOnceForEachKindOfKey(t *testing.T) {
	for _, kind := range state.KeyTypes() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "s")
			d := open(t, path)
			first, err := d.EnsureRequest(kind)
			if err != nil {
				t.Fatal(err)
			}
			_ = d.Close()
			again, err := open(t, path).EnsureRequest(state.ECDSAP256)
			if err != nil || !bytes.Equal(first.CSR, again.CSR) {
				t.Fatalf("another request after a restart (error %v)", err)
			}
			csr, err := x509.ParseCertificateRequest(first.CSR)
			if err != nil || csr.CheckSignature() != nil || len(csr.Subject.Names)+len(csr.Extensions) > 0 {
				t.Errorf("the request says more than its key, or does not verify (error %v)", err)
			}
			ok := false
			switch k := first.Key.Public().(type) {
			case *ecdsa.PublicKey:
				ok = kind == state.ECDSAP256 && k.Curve.Params().BitSize == 256 || kind == state.ECDSAP384 && k.Curve.Params().BitSize == 384
			case ed25519.PublicKey:
				ok = kind == state.Ed25519
			case *rsa.PublicKey:
				ok = strings.HasPrefix(string(kind), "rsa-") && k.N.BitLen() >= 2048
			}
			if !ok {
				t.Errorf("%T for %s", first.Key.Public(), kind)
			}
		})
	}
}

// TestDamagedRequestIsNeverMadeAnew cuts, swaps and garbles the file: a clear
// error that names it and what to do, and the file left as it is.
func TestDamagedRequestIsNeverMadeAnew(t *testing.T) {
	good := func(t *testing.T) []byte {
		d := open(t, filepath.Join(t.TempDir(), "s"))
		if _, err := d.EnsureRequest(state.ECDSAP256); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(filepath.Join(d.Path(), "request.pem"))
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	one, two := good(t), good(t)
	split := bytes.Index(one, []byte("-----BEGIN CERTIFICATE REQUEST"))
	splitTwo := bytes.Index(two, []byte("-----BEGIN CERTIFICATE REQUEST"))
	for name, raw := range map[string][]byte{
		"empty":                   {},
		"zeros":                   make([]byte, len(one)),
		"cut in the key":          one[:split/2],
		"key without request":     one[:split],
		"request without key":     one[split:],
		"cut in the request":      one[:len(one)-40],
		"another key's request":   append(bytes.Clone(one[:split]), two[splitTwo:]...),
		"something after it":      append(bytes.Clone(one), "tail"...),
		"a key that is not PKCS8": append([]byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), one[split:]...),
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			d := open(t, path)
			file := filepath.Join(path, "request.pem")
			if err := os.WriteFile(file, raw, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := d.EnsureRequest(state.ECDSAP256)
			damaged, ok := errors.AsType[*state.DamagedError](err)
			if !ok || damaged.Path != file || !strings.Contains(err.Error(), "backup") {
				t.Errorf("error %v", err)
			}
			if after, _ := os.ReadFile(file); !bytes.Equal(after, raw) {
				t.Error("the file was changed")
			}
		})
	}
}

// TestOpenClosesADirectoryThatOthersCanRead and refuses what is no directory.
func TestOpenClosesADirectoryThatOthersCanRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	open(t, path)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, error %v", info.Mode(), err)
	}
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := state.Open(file); err == nil {
		t.Error("a file passes for a directory")
	}
}

// TestDamagedIdentityAndProgressSayWhatToDo garbles the rest.
func TestDamagedIdentityAndProgressSayWhatToDo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	d := open(t, path)
	if _, err := d.Identity(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no identity: %v", err)
	}
	if err := os.Symlink("identities/9", filepath.Join(path, "current")); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Identity(); err == nil || errors.Is(err, fs.ErrNotExist) && !strings.Contains(err.Error(), "join again") {
		t.Errorf("a link to nothing: %v", err)
	}
	if err := os.WriteFile(filepath.Join(path, "progress.json"), []byte(`{"pending":`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Progress(); err == nil || !strings.Contains(err.Error(), "Remove it") {
		t.Errorf("cut progress: %v", err)
	}
}
