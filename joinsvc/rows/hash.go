package rows

import (
	"fmt"
	"io"
	"io/fs"
)

// HashMigrations writes all migrations, with their names, into w: what tells one
// schema from another.
func HashMigrations(w io.Writer) error {
	return fs.WalkDir(migrations, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := migrations.ReadFile(path)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s\x00%d\x00%s", path, len(b), b)
		return err
	})
}
