package state

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// The files of an identity. A reader that opens them under one resolved
// "current" has the files of one identity.
const (
	KeyFile      = "key.pem"
	CertFile     = "cert.pem"
	CAFile       = "ca.pem"
	identityFile = "identity.json"
)

// Identity is what a machine was admitted as.
type Identity struct {
	TrustDomain string    `json:"trustDomain"`
	Tenant      string    `json:"tenant"`
	Site        string    `json:"site,omitempty"`
	Pool        string    `json:"pool,omitempty"`
	Role        wire.Role `json:"role"`
	NodeID      string    `json:"nodeID"`
	Attestor    string    `json:"attestor"`
	// AllowedKinds is absent where the certificate restricts nothing.
	AllowedKinds *[]string `json:"allowedKinds,omitempty"`
	NotBefore    time.Time `json:"notBefore"`
	NotAfter     time.Time `json:"notAfter"`
	// CertificateSHA256 is lower-case hex over the leaf's DER.
	CertificateSHA256 string `json:"certificateSHA256"`
	// Serial is the leaf's serial number in lower-case hex.
	Serial string `json:"serial"`
	// JoinedAt is the service's time of the answer.
	JoinedAt time.Time `json:"joinedAt"`
	// RenewAt is when to ask for the next certificate, by the service's time. It is
	// chosen once, so that restarts do not choose again until it is now.
	RenewAt time.Time `json:"renewAt,omitzero"`

	// Key is the certificate's private key.
	Key crypto.Signer `json:"-"`
	// Generation counts the identities that this directory has held, from 1.
	Generation int `json:"-"`
	// Chain is the leaf and what leads to its CA, DER. CAs are the authorities
	// that this machine trusts for its peers, DER.
	Chain [][]byte `json:"-"`
	CAs   [][]byte `json:"-"`
}

// SPIFFEID is the identity's name (SPIFFE ID specification, section 2).
func (i *Identity) SPIFFEID() string {
	return "spiffe://" + i.TrustDomain + "/tenant/" + i.Tenant + "/" + string(i.Role) + "/" + i.NodeID
}

// Outputs are places outside the state directory that get copies of an
// identity's files; an empty one gets none.
type Outputs struct {
	Key, Cert, CA string
}

// StoreIdentity writes an identity with the request's key as a new generation and
// puts it in force by one rename. After an error the identity before it is in
// force. It sets the identity's Key and Generation.
func (d *Dir) StoreIdentity(id *Identity, request *Request) error {
	if len(id.Chain) == 0 {
		return errors.New("store an identity: it has no certificate")
	}
	meta, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	root := d.file(identitiesName)
	if err := d.fsys.Mkdir(root, dirPerm); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("store the identity: %w", err)
	}
	if err := syncDir(d.fsys, d.path); err != nil {
		return fmt.Errorf("store the identity: %w", err)
	}
	generation, err := d.nextGeneration()
	if err != nil {
		return fmt.Errorf("store the identity: %w", err)
	}
	files := map[string][]byte{
		KeyFile: request.keyPEM, CertFile: encodeCerts(id.Chain), CAFile: encodeCerts(id.CAs), identityFile: append(meta, '\n'),
	}
	if err := d.writeGeneration(root, generation, files); err != nil {
		return fmt.Errorf("store the identity: %w", err)
	}
	if err := replaceLink(d.fsys, d.file(currentName), filepath.Join(identitiesName, generation)); err != nil {
		return fmt.Errorf("put the identity in force: %w", err)
	}
	id.Key = request.Key
	if id.Generation, err = strconv.Atoi(generation); err != nil {
		return err
	}
	// It stands, whatever becomes of the ones before it: the next opening clears
	// what is left.
	_ = d.removeStaleIdentities()
	return nil
}

func (d *Dir) writeGeneration(root, generation string, files map[string][]byte) (err error) {
	temp := tempName(root)
	defer func() {
		if err != nil {
			err = errors.Join(err, d.fsys.RemoveAll(temp))
		}
	}()
	if err := d.fsys.Mkdir(temp, dirPerm); err != nil {
		return err
	}
	for _, name := range []string{KeyFile, CertFile, CAFile, identityFile} {
		perm := publicPerm
		if name == KeyFile {
			perm = secretPerm
		}
		if err := writeNew(d.fsys, filepath.Join(temp, name), files[name], perm); err != nil {
			return err
		}
	}
	if err := syncDir(d.fsys, temp); err != nil {
		return err
	}
	if err := d.fsys.Rename(temp, filepath.Join(root, generation)); err != nil {
		return err
	}
	return syncDir(d.fsys, root)
}

// nextGeneration is one more than the highest there is.
func (d *Dir) nextGeneration() (string, error) {
	entries, err := os.ReadDir(d.file(identitiesName))
	if err != nil {
		return "", err
	}
	highest := 0
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			highest = max(highest, n)
		}
	}
	return strconv.Itoa(highest + 1), nil
}

// Identity reads the identity in force. It returns an error that is
// [fs.ErrNotExist] where there is none yet, and a [*DamagedError] where it
// cannot be read.
func (d *Dir) Identity() (*Identity, error) {
	link := d.file(currentName)
	target, err := os.Readlink(link)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err != nil {
		return nil, d.damagedIdentity(link, err)
	}
	// Everything is read under the resolved name: the link may move meanwhile.
	dir := d.file(target)
	id, err := readIdentity(dir)
	if err != nil {
		return nil, d.damagedIdentity(dir, err)
	}
	return id, nil
}

// damagedIdentity says how to get the identity back. Its key and request are in
// [Request] still, and the same request gets the same certificate again: from
// the identity before it as a renewal, else from the token.
func (d *Dir) damagedIdentity(path string, err error) error {
	remedy := "Remove " + d.file(currentName) + " and join again with the same token: the same key and request get the same certificate again"
	if n, convErr := strconv.Atoi(filepath.Base(path)); convErr == nil {
		before := filepath.Join(identitiesName, strconv.Itoa(n-1))
		if _, readErr := readIdentity(d.file(before)); readErr == nil {
			remedy = "Put the one before it in force (ln -sfn " + before + " " + d.file(currentName) + ") and start bcd run: the same request gets the same certificate again"
		}
	}
	return &DamagedError{Path: path, Err: err, Remedy: remedy}
}

func readIdentity(dir string) (*Identity, error) {
	meta, err := os.ReadFile(filepath.Join(dir, identityFile))
	if err != nil {
		return nil, err
	}
	var id Identity
	if err := json.Unmarshal(meta, &id); err != nil {
		return nil, err
	}
	if id.Chain, err = readCerts(filepath.Join(dir, CertFile)); err != nil {
		return nil, err
	}
	if id.CAs, err = readCerts(filepath.Join(dir, CAFile)); err != nil {
		return nil, err
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, CertFile), filepath.Join(dir, KeyFile))
	if err != nil {
		return nil, fmt.Errorf("certificate and key: %w", err)
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s cannot sign", KeyFile)
	}
	id.Key = key
	if id.Generation, err = strconv.Atoi(filepath.Base(dir)); err != nil {
		return nil, fmt.Errorf("%s is not a generation", dir)
	}
	if sum := sha256.Sum256(id.Chain[0]); hex.EncodeToString(sum[:]) != id.CertificateSHA256 {
		return nil, fmt.Errorf("%s and %s belong to two identities", identityFile, CertFile)
	}
	return &id, nil
}

// CurrentFiles are the paths of the identity in force inside the directory.
// They lead through one symbolic link that a single rename moves.
func (d *Dir) CurrentFiles() Outputs {
	current := d.file(currentName)
	return Outputs{Key: filepath.Join(current, KeyFile), Cert: filepath.Join(current, CertFile), CA: filepath.Join(current, CAFile)}
}

// WriteOutputs copies the identity in force to where it was asked for, each file
// by one rename: the key first and the certificate last, so that who waits for
// the certificate finds the rest. It may be called again after an error or a
// crash; what is there already and right is left alone.
func (d *Dir) WriteOutputs(out Outputs) error {
	from := d.CurrentFiles()
	for _, c := range []struct {
		from, to string
		perm     fs.FileMode
	}{{from.Key, out.Key, secretPerm}, {from.CA, out.CA, publicPerm}, {from.Cert, out.Cert, publicPerm}} {
		if c.to == "" {
			continue
		}
		if err := d.copyOut(c.from, c.to, c.perm); err != nil {
			return fmt.Errorf("write %s: %w", c.to, err)
		}
	}
	return nil
}

func (d *Dir) copyOut(from, to string, perm fs.FileMode) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Lstat(to)
	if err == nil && info.Mode().IsRegular() && info.Mode().Perm() == perm {
		if there, err := os.ReadFile(to); err == nil && bytes.Equal(there, data) {
			return nil
		}
	}
	dir := filepath.Dir(to)
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // others read certificates there
		return err
	}
	// The directory is not ours, so what a killed process left there has a name
	// that only a copy to the same place has.
	temp := filepath.Join(dir, tempMark+filepath.Base(to))
	if err := d.fsys.RemoveAll(temp); err != nil {
		return err
	}
	return replaceFileBy(d.fsys, temp, to, data, perm)
}

// removeStaleIdentities clears what is neither in force nor the one before.
func (d *Dir) removeStaleIdentities() error {
	root := d.file(identitiesName)
	if err := removeTemps(d.fsys, root); err != nil {
		return err
	}
	target, err := os.Readlink(d.file(currentName))
	if err != nil {
		return nil //nolint:nilerr // nothing is in force, so nothing is stale
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil //nolint:nilerr // nothing is in force, so nothing is stale
	}
	current, err := strconv.Atoi(filepath.Base(target))
	if err != nil {
		return nil //nolint:nilerr // nothing is in force, so nothing is stale
	}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		if err != nil || n == current || n == current-1 {
			continue
		}
		if err := d.fsys.RemoveAll(filepath.Join(root, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func encodeCerts(ders [][]byte) []byte {
	var out []byte
	for _, der := range ders {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der})...)
	}
	return out
}

func readCerts(path string) ([][]byte, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var ders [][]byte
	for {
		var block *pem.Block
		if block, raw = pem.Decode(raw); block == nil {
			break
		}
		if _, err := x509.ParseCertificate(block.Bytes); block.Type != pemCert || err != nil {
			return nil, fmt.Errorf("%s holds something that is not a certificate", filepath.Base(path))
		}
		ders = append(ders, block.Bytes)
	}
	if len(ders) == 0 || len(bytes.TrimSpace(raw)) > 0 {
		return nil, fmt.Errorf("%s is not a list of certificates in PEM", filepath.Base(path))
	}
	return slices.Clip(ders), nil
}
