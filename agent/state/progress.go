package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

// Progress is what the last exchange said, kept for a person to read and for a
// confirmation to be finished. Losing it loses no join.
type Progress struct {
	// Pending is set while a person has to decide.
	Pending *Pending `json:"pending,omitempty"`
	// LastProblem says in a few words why the last exchange brought no certificate.
	LastProblem string `json:"lastProblem,omitempty"`
	// LastTriedAt is this machine's time of the last exchange.
	LastTriedAt time.Time `json:"lastTriedAt,omitzero"`
	// ClockOffsetSeconds is how far this machine's clock is ahead of the
	// service's, negative where it lags, by the last signed answer.
	ClockOffsetSeconds int64 `json:"clockOffsetSeconds,omitempty"`
	// SignedAt is the latest time that the service signed.
	SignedAt time.Time `json:"signedAt,omitzero"`
	// NextTryAt is this machine's time of the next exchange after one that failed.
	NextTryAt time.Time `json:"nextTryAt,omitzero"`
	// ConfirmedSHA256 is the certificate that the service knows to be stored.
	ConfirmedSHA256 string `json:"confirmedSHA256,omitempty"`
	// Reload is how the reload command fared.
	Reload *Reload `json:"reload,omitempty"`
}

// Settled forgets what stood in the way of a certificate that is stored now.
func (p *Progress) Settled() { p.Pending, p.LastProblem, p.NextTryAt = nil, "", time.Time{} }

// Reload is the last run of the command that follows a new certificate.
type Reload struct {
	// CertificateSHA256 is the certificate that it was run for; a command that was
	// cut short left no trace and is run again.
	CertificateSHA256 string    `json:"certificateSHA256"`
	At                time.Time `json:"at"`
	// Problem is empty where it ended well.
	Problem string `json:"problem,omitempty"`
}

// Pending is a join that waits for a person.
type Pending struct {
	JoinRequest string `json:"joinRequest"`
	// Tenant is the namespace of the JoinRequest where the answer named it.
	Tenant string    `json:"tenant,omitempty"`
	Since  time.Time `json:"since"`
}

// Progress reads what the last exchange said; nothing where there was none.
func (d *Dir) Progress() (Progress, error) {
	var p Progress
	path := d.file(progressName)
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(raw, &p); err != nil {
		return Progress{}, &DamagedError{Path: path, Err: err, Remedy: "Remove it: no join is lost with it"}
	}
	return p, nil
}

// StoreProgress replaces what the last exchange said.
func (d *Dir) StoreProgress(p Progress) error {
	raw, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}
	if err := replaceFile(d.fsys, d.file(progressName), append(raw, '\n')); err != nil {
		return fmt.Errorf("store the progress: %w", err)
	}
	return nil
}

// Bundle reads the pinned bundle's bytes. It returns an error that is
// [fs.ErrNotExist] where none is pinned yet.
func (d *Dir) Bundle() ([]byte, error) { return os.ReadFile(d.file(bundleName)) }

// BundlePath is where the pinned bundle lies.
func (d *Dir) BundlePath() string { return d.file(bundleName) }

// StoreBundle replaces the pinned bundle. The caller has checked that it may.
func (d *Dir) StoreBundle(raw []byte) error {
	if err := replaceFile(d.fsys, d.file(bundleName), raw); err != nil {
		return fmt.Errorf("pin the bundle: %w", err)
	}
	return nil
}
