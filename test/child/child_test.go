package child_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/join-operator/test/child"
)

// TestMain lets this binary play the test binary that gets killed.
func TestMain(m *testing.M) {
	if os.Getenv("CHILD_TEST_VICTIM") != "" {
		victim()
	}
	os.Exit(m.Run())
}

// victim starts a server and prints its number and its folder.
func victim() {
	dir, err := child.TempDir("child test-", nil)
	if err != nil {
		panic(err)
	}
	p, err := child.Start(child.Command{Path: "/bin/sleep", Args: []string{"600"}, Log: filepath.Join(dir, "log")})
	if err != nil {
		panic(err)
	}
	gone, err := child.Start(child.Command{Path: "/bin/true", Log: filepath.Join(dir, "log")})
	if err != nil {
		panic(err)
	}
	<-gone.Done()
	fmt.Printf("%d\n%s\n", p.PID(), dir)
	select {}
}

func TestServersEndAndFoldersGoWhenTheTestBinaryIsKilled(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CHILD_TEST_VICTIM=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	var got []string
	for len(got) < 2 && lines.Scan() {
		got = append(got, lines.Text())
	}
	if len(got) != 2 {
		t.Fatalf("the victim printed %q", got)
	}
	pid, err := strconv.Atoi(got[0])
	if err != nil {
		t.Fatal(err)
	}
	if !runs(pid) {
		t.Fatal("the server does not run")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	deadline := time.Now().Add(10 * time.Second)
	for {
		_, err := os.Stat(got[1])
		if !runs(pid) && errors.Is(err, os.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("10 s after the kill: server runs: %t, folder: %v", runs(pid), err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// runs is false for a zombie too: in a container nobody may collect it.
func runs(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z")
}

func TestAwaitTellsTheEndOfTheLogOfAServerThatEnded(t *testing.T) {
	t.Parallel()
	p, err := child.Start(child.Command{Path: "/bin/sh", Args: []string{"-c", "echo no such thing; exit 3"}, Log: filepath.Join(t.TempDir(), "log")})
	if err != nil {
		t.Fatal(err)
	}
	err = p.Await(t.Context(), func(context.Context) error { return errors.New("not yet") })
	if err == nil || !strings.Contains(err.Error(), "no such thing") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v", err)
	}
}
