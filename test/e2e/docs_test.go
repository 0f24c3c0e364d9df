package e2e

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

var shellBlock = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// TestTutorialRunsAsWritten runs the blocks of a page one after the other in one
// shell, as a reader would paste them.
func TestTutorialRunsAsWritten(t *testing.T) {
	page, err := os.ReadFile("../../docs/tutorial.md")
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	script.WriteString("set -euo pipefail\n")
	for _, m := range shellBlock.FindAllSubmatch(page, -1) {
		script.Write(m[1])
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", script.String())
	cmd.Dir = t.TempDir()
	cmd.Env = sys.environ()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	t.Logf("%s", out)
}
