package state

import (
	"io"
	"io/fs"
	"os"
)

// FileSystem is every change that this package makes on disk, so that a test can
// stop it at each of them. Reads go to the operating system directly.
type FileSystem interface {
	OpenFile(name string, flag int, perm fs.FileMode) (File, error)
	Mkdir(name string, perm fs.FileMode) error
	Rename(from, to string) error
	Symlink(target, name string) error
	RemoveAll(name string) error
}

// File is an open file or directory.
type File interface {
	io.WriteCloser
	Sync() error
}

type osFileSystem struct{}

func (osFileSystem) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	return os.OpenFile(name, flag, perm)
}
func (osFileSystem) Mkdir(name string, perm fs.FileMode) error { return os.Mkdir(name, perm) }
func (osFileSystem) Rename(from, to string) error              { return os.Rename(from, to) }
func (osFileSystem) Symlink(target, name string) error         { return os.Symlink(target, name) }
func (osFileSystem) RemoveAll(name string) error               { return os.RemoveAll(name) }
