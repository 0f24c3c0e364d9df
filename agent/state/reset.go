package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

const resetWithBundle = "with bundle\n"

// Reset forgets the identity, the key and the request, and with bundle also what
// is pinned. A mark comes first and goes last: where a reset was cut short, the
// next [Open] finishes it, so that nobody goes on with half of an identity.
func (d *Dir) Reset(bundle bool) error {
	mark := ""
	if bundle {
		mark = resetWithBundle
	}
	if err := replaceFile(d.fsys, d.file(resetName), []byte(mark)); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	return d.finishReset()
}

// finishReset does nothing where no reset was begun.
func (d *Dir) finishReset() error {
	mark, err := os.ReadFile(d.file(resetName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	names := []string{currentName, identitiesName, requestName, progressName}
	if string(mark) == resetWithBundle {
		names = append(names, bundleName)
	}
	for _, name := range names {
		if err := d.fsys.RemoveAll(d.file(name)); err != nil {
			return fmt.Errorf("reset: %w", err)
		}
	}
	// Else a power cut could bring something back that no mark tells of.
	if err := syncDir(d.fsys, d.path); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	if err := d.fsys.RemoveAll(d.file(resetName)); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	return nil
}
