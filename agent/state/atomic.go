package state

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// tempMark begins the base name of whatever is not finished: it may be removed
// by whoever holds the lock.
const tempMark = ".bcd-tmp-"

func tempName(dir string) string { return filepath.Join(dir, tempMark+rand.Text()) }

// replaceFile puts data (mode 0600) at path so that every reader, and every power cut, finds
// the old content or the new one: a new file beside it is written and synced,
// renamed over it, and the directory synced.
func replaceFile(fsys FileSystem, path string, data []byte) error {
	return replaceFileBy(fsys, tempName(filepath.Dir(path)), path, data, secretPerm)
}

// replaceFileBy is replaceFile with the unfinished file's name and the mode given.
func replaceFileBy(fsys FileSystem, temp, path string, data []byte, perm fs.FileMode) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, fsys.RemoveAll(temp))
		}
	}()
	if err := writeNew(fsys, temp, data, perm); err != nil {
		return err
	}
	if err := fsys.Rename(temp, path); err != nil {
		return err
	}
	return syncDir(fsys, filepath.Dir(path))
}

// writeNew makes a file that is not there yet and syncs it.
func writeNew(fsys FileSystem, path string, data []byte, perm fs.FileMode) error {
	f, err := fsys.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	if _, err := f.Write(data); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Sync(); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// replaceLink makes path a symbolic link to target in one step.
func replaceLink(fsys FileSystem, path, target string) (err error) {
	dir := filepath.Dir(path)
	temp := tempName(dir)
	defer func() {
		if err != nil {
			err = errors.Join(err, fsys.RemoveAll(temp))
		}
	}()
	if err := fsys.Symlink(target, temp); err != nil {
		return err
	}
	if err := fsys.Rename(temp, path); err != nil {
		return err
	}
	return syncDir(fsys, dir)
}

func syncDir(fsys FileSystem, dir string) error {
	d, err := fsys.OpenFile(dir, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return errors.Join(err, d.Close())
	}
	return d.Close()
}

// removeTemps clears what an earlier process did not finish in dir.
func removeTemps(fsys FileSystem, dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempMark) {
			if err := fsys.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove an unfinished file: %w", err)
			}
		}
	}
	return nil
}
