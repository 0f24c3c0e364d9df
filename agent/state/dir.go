// Package state keeps what a machine must not lose: its key and request, the
// bundle that it pinned, and the identity that it was given.
//
// Whatever is in the directory is whole: each change is written beside the old
// content, synced, and swapped in by one rename. A process that is killed at any
// point, or that finds the disk full, leaves the old state or the new one, and
// the next process goes on from it. One process at a time may change it.
//
//	lock                held (flock) by the process that may change the rest
//	request.pem         the private key and the certificate request, together:
//	                    those of current, or not answered yet
//	reset               there while the directory is being emptied
//	bundle.json         the pinned bundle, byte for byte
//	progress.json       what the last exchange said; nothing depends on it
//	current             symbolic link to the identity in force
//	identities/<n>/     key.pem, cert.pem, ca.pem, identity.json
package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

const (
	lockName       = "lock"
	requestName    = "request.pem"
	bundleName     = "bundle.json"
	progressName   = "progress.json"
	resetName      = "reset"
	currentName    = "current"
	identitiesName = "identities"

	dirPerm    fs.FileMode = 0o700
	secretPerm fs.FileMode = 0o600
	publicPerm fs.FileMode = 0o644
)

// ErrLocked is returned by [Open] while another process has the directory open.
var ErrLocked = errors.New("another bcd uses this state directory")

// DamagedError says that a file of the directory cannot be what this package
// wrote. Nothing is ever made anew in its place: a person decides.
type DamagedError struct {
	Path string
	// Remedy is what a person can do, in a sentence.
	Remedy string
	Err    error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("%s is damaged: %v. %s", e.Path, e.Err, e.Remedy)
}

func (e *DamagedError) Unwrap() error { return e.Err }

// Dir is a state directory.
type Dir struct {
	path string
	fsys FileSystem
	lock *os.File
}

// Option changes how a directory is opened.
type Option func(*Dir)

// WithFileSystem makes every change on disk through fsys.
func WithFileSystem(fsys FileSystem) Option { return func(d *Dir) { d.fsys = fsys } }

// Open makes the directory (mode 0700) where it is missing, takes its lock, and
// clears what an earlier process left unfinished. It returns [ErrLocked] while
// another process has it open.
func Open(path string, options ...Option) (*Dir, error) {
	d, err := at(path, options)
	if err != nil {
		return nil, err
	}
	if err := d.makeDir(); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	if err := d.takeLock(); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := d.clean(); err != nil {
		return nil, errors.Join(fmt.Errorf("clean the state directory: %w", err), d.Close())
	}
	return d, nil
}

// View opens the directory to read it, beside a process that changes it. Methods
// that change it must not be called.
func View(path string) (*Dir, error) {
	d, err := at(path, nil)
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(d.path)
	if err != nil {
		return nil, fmt.Errorf("read the state directory: %w", err)
	}
	if !info.IsDir() {
		return nil, fmt.Errorf("%s is not a directory", path)
	}
	return d, nil
}

func at(path string, options []Option) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	d := &Dir{path: abs, fsys: osFileSystem{}}
	for _, o := range options {
		o(d)
	}
	return d, nil
}

// Close gives the lock back.
func (d *Dir) Close() error {
	if d.lock == nil {
		return nil
	}
	err := d.lock.Close()
	d.lock = nil
	return err
}

// Path is the directory's absolute path.
func (d *Dir) Path() string { return d.path }

func (d *Dir) file(name string) string { return filepath.Join(d.path, name) }

func (d *Dir) makeDir() error {
	info, err := os.Stat(d.path)
	if errors.Is(err, fs.ErrNotExist) {
		parent := filepath.Dir(d.path)
		if err := os.MkdirAll(parent, 0o755); err != nil { //nolint:gosec // the parent is the system's, as /var/lib is
			return err
		}
		if err := d.fsys.Mkdir(d.path, dirPerm); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return syncDir(d.fsys, parent)
	}
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory", d.path)
	}
	if info.Mode().Perm()&0o077 == 0 {
		return nil
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && int(owner.Uid) != os.Geteuid() {
		return fmt.Errorf("%s is open to other users and belongs to uid %d: chown it to uid %d and chmod it 0700", d.path, owner.Uid, os.Geteuid())
	}
	return os.Chmod(d.path, dirPerm)
}

// takeLock locks a file that is never removed, so that no two processes can hold
// locks on two files of one name. The kernel frees the lock of a killed process.
func (d *Dir) takeLock() error {
	f, err := os.OpenFile(d.file(lockName), os.O_RDWR|os.O_CREATE, secretPerm)
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			err = ErrLocked
		}
		return errors.Join(err, f.Close())
	}
	d.lock = f
	return nil
}

func (d *Dir) clean() error {
	if err := d.finishReset(); err != nil {
		return err
	}
	if err := removeTemps(d.fsys, d.path); err != nil {
		return err
	}
	return d.removeStaleIdentities()
}
