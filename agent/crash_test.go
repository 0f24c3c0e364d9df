package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/join-operator/agent"
	"github.com/better-compute/join-operator/agent/agenttest"
	"github.com/better-compute/join-operator/agent/state"
	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/attestors/jointoken"
)

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// faulty is a file system whose nth change meets a fate. A write is two changes:
// the fate may come in its middle.
type faulty struct {
	n    int
	fate func(what string) error
	step int
	// trace lists the changes: "rename state/request.pem".
	trace []string
}

func (f *faulty) at(what string) error {
	f.step++
	f.trace = append(f.trace, what)
	if f.n != 0 && f.step >= f.n {
		return f.fate(what)
	}
	return nil
}

func (f *faulty) OpenFile(name string, flag int, perm fs.FileMode) (state.File, error) {
	if err := f.at("open " + name); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(name, flag, perm)
	return &faultyFile{file, f}, err
}

func (f *faulty) Mkdir(name string, perm fs.FileMode) error {
	if err := f.at("mkdir " + name); err != nil {
		return err
	}
	return os.Mkdir(name, perm)
}

func (f *faulty) Rename(from, to string) error {
	if err := f.at("rename " + from + " " + to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

func (f *faulty) Symlink(target, name string) error {
	if err := f.at("symlink " + name); err != nil {
		return err
	}
	return os.Symlink(target, name)
}

func (f *faulty) RemoveAll(name string) error {
	// Removing frees room: it works on a full disk, and counts only for a crash.
	if err := f.at("remove " + name); err != nil && !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	return os.RemoveAll(name)
}

type faultyFile struct {
	*os.File
	f *faulty
}

func (x *faultyFile) Write(p []byte) (int, error) {
	half := len(p) / 2
	n, err := x.File.Write(p[:half])
	if err != nil {
		return n, err
	}
	if err := x.f.at("write " + x.Name()); err != nil {
		return n, err
	}
	m, err := x.File.Write(p[half:])
	return n + m, err
}

func (x *faultyFile) Sync() error {
	if err := x.f.at("sync " + x.Name()); err != nil {
		return err
	}
	return x.File.Sync()
}

const (
	crashEnv  = "JOIN_TEST_CRASH_AT"
	stateEnv  = "JOIN_TEST_STATE"
	bundleEnv = "JOIN_TEST_BUNDLE"
	tokenEnv  = "JOIN_TEST_TOKEN"
	outEnv    = "JOIN_TEST_OUT"
	// timeEnv is the simulated time as a duration since [agenttest.Start]: with it
	// the machine does not join, but runs.
	timeEnv   = "JOIN_TEST_TIME"
	stepsExit = 17
)

// TestMain is the machine's process in the crash test, and a test elsewhere.
func TestMain(m *testing.M) {
	if os.Getenv(crashEnv) == "" {
		os.Exit(m.Run())
	}
	os.Exit(crashingMachine())
}

// crashingMachine joins, and kills itself before the given change on disk.
func crashingMachine() int {
	n, err := strconv.Atoi(os.Getenv(crashEnv))
	if err != nil {
		return 2
	}
	f := &faulty{n: n, fate: func(string) error {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}}
	dir, err := state.Open(os.Getenv(stateEnv), state.WithFileSystem(f))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	bundle, err := os.ReadFile(os.Getenv(bundleEnv))
	if err != nil {
		return 2
	}
	clock := agenttest.NewClock()
	elapsed, runs := os.LookupEnv(timeEnv)
	if runs {
		d, err := time.ParseDuration(elapsed)
		if err != nil {
			return 2
		}
		clock.Advance(d)
	}
	m, err := agent.New(agent.Config{State: dir, FirstBundle: bundle, Logger: quiet(), Clock: clock})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	if runs {
		return runningMachine(m)
	}
	p, err := jointoken.NewProducer(os.Getenv(tokenEnv))
	if err != nil {
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := m.Join(ctx, agent.JoinOptions{Producer: p, Role: wire.RoleNode, Outputs: outputsIn(os.Getenv(outEnv))}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	return stepsExit
}

// runningMachine does what is due, and has its reload command note for what.
func runningMachine(m *agent.Machine) int {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out := outputsIn(os.Getenv(outEnv))
	err := m.Run(ctx, agent.RunOptions{
		Join: agent.JoinOptions{Role: wire.RoleNode, Outputs: out, Once: true},
		Reload: func(_ context.Context, id *state.Identity) error {
			return os.WriteFile(filepath.Join(filepath.Dir(out.Key), "reloaded"), []byte(id.CertificateSHA256), 0o600)
		},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	return stepsExit
}

func outputsIn(dir string) state.Outputs {
	return state.Outputs{Key: filepath.Join(dir, "key"), Cert: filepath.Join(dir, "cert"), CA: filepath.Join(dir, "ca")}
}

// process runs a machine as a process of its own, which is killed at the nth
// change on disk.
func process(t *testing.T, s *agenttest.Service, n int, dir string, env ...string) (code int, signal syscall.Signal, stderr string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bundle := filepath.Join(dir, "bundle.json")
	if err := os.WriteFile(bundle, s.Bundle(), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self)
	var out bytes.Buffer
	cmd.Stderr = &out
	cmd.Env = append(os.Environ(), crashEnv+"="+strconv.Itoa(n), stateEnv+"="+filepath.Join(dir, "state"), bundleEnv+"="+bundle, outEnv+"="+filepath.Join(dir, "out"))
	cmd.Env = append(cmd.Env, env...)
	err = cmd.Run()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		t.Fatalf("run the machine: %v", err)
	}
	status := exit.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return -1, status.Signal(), out.String()
	}
	return status.ExitStatus(), 0, out.String()
}

// never is no change on disk.
const never = 1 << 30

// TestKillAtEveryChangeOnDiskStillJoinsOnce kills a real process (SIGKILL) before
// each change that it makes on disk, and in the middle of each write; then lets
// the next process go on. It must join, as one node, with one key.
func TestKillAtEveryChangeOnDiskStillJoinsOnce(t *testing.T) {
	s := agenttest.New(t)
	run := func(n int, dir, token string) (int, syscall.Signal, string) {
		return process(t, s, n, dir, tokenEnv+"="+token)
	}
	killed := 0
	for n := 1; ; n++ {
		dir, token := t.TempDir(), jointoken.Generate().Text()
		nodes := s.Nodes()
		code, signal, stderr := run(n, dir, token)
		if code == stepsExit {
			break
		}
		if signal != syscall.SIGKILL {
			t.Fatalf("change %d: exit %d, signal %v: %s", n, code, signal, stderr)
		}
		killed++
		if code, signal, stderr := run(never, dir, token); code != stepsExit {
			t.Fatalf("after a kill at change %d: exit %d, signal %v: %s", n, code, signal, stderr)
		}
		if got := s.Nodes() - nodes; got != 1 {
			t.Errorf("after a kill at change %d: %d nodes", n, got)
		}
		checkWhole(t, filepath.Join(dir, "state"), outputsIn(filepath.Join(dir, "out")), s)
	}
	if killed < 40 {
		t.Errorf("killed at %d changes only: the test missed most", killed)
	}
}

// checkWhole holds what is on disk against itself and the service.
func checkWhole(t *testing.T, path string, out state.Outputs, s *agenttest.Service) {
	t.Helper()
	dir, err := state.View(path)
	if err != nil {
		t.Fatal(err)
	}
	id, err := dir.Identity()
	if err != nil {
		t.Fatal(err)
	}
	if s.Confirmed(id.CertificateSHA256) == 0 {
		t.Error("not confirmed")
	}
	inner := dir.CurrentFiles()
	for _, pair := range [][2]string{{inner.Key, out.Key}, {inner.Cert, out.Cert}, {inner.CA, out.CA}} {
		a, err1 := os.ReadFile(pair[0])
		b, err2 := os.ReadFile(pair[1])
		if err1 != nil || err2 != nil || !bytes.Equal(a, b) || len(a) == 0 {
			t.Errorf("%s is not a copy of %s (%v, %v)", pair[1], pair[0], err1, err2)
		}
	}
	err = filepath.WalkDir(filepath.Dir(path), func(p string, _ fs.DirEntry, err error) error {
		if bytes.Contains([]byte(filepath.Base(p)), []byte("tmp")) {
			t.Errorf("%s was left behind", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// TestFullDiskAtEveryChangeLosesNothing has the disk full from the nth change on;
// then there is room again, in the same process where it goes on, or in the next.
func TestFullDiskAtEveryChangeLosesNothing(t *testing.T) {
	for n := 1; ; n++ {
		b := newBench(t)
		_ = b.dir.Close()
		f := &faulty{n: n, fate: func(string) error { return syscall.ENOSPC }}
		out := outputsIn(filepath.Join(t.TempDir(), "out"))
		joined, err := func() (*agent.Joined, error) {
			dir, err := state.Open(b.path, state.WithFileSystem(f))
			if err != nil {
				return nil, err
			}
			defer dir.Close()
			m, err := agent.New(agent.Config{State: dir, FirstBundle: b.Bundle(), Logger: quiet(), Clock: b.clock})
			if err != nil {
				return nil, err
			}
			o := b.options()
			o.Once, o.Outputs = true, out
			return m.Join(t.Context(), o)
		}()
		if f.step < n {
			if n < 40 {
				t.Errorf("only %d changes", f.step)
			}
			break
		}
		if err != nil && !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("full at change %d: %v", n, err)
		}
		if err == nil && joined == nil {
			t.Fatalf("full at change %d: neither joined nor failed", n)
		}
		b.open()
		o := b.options()
		o.Outputs = out
		o.Once = true
		if _, err := b.machine().Join(t.Context(), o); err != nil {
			t.Fatalf("with room again after change %d: %v", n, err)
		}
		if b.Nodes() != 1 {
			t.Errorf("full at change %d: %d nodes", n, b.Nodes())
		}
		checkWhole(t, b.path, out, b.Service)
	}
}

// TestFullDiskIsWaitedOutByARunningMachine frees the disk while it backs off.
func TestFullDiskIsWaitedOutByARunningMachine(t *testing.T) {
	b := newBench(t)
	_ = b.dir.Close()
	f := &faulty{fate: func(string) error {
		if len(b.clock.Sleeps()) >= 3 {
			return nil
		}
		return syscall.ENOSPC
	}}
	b.open(state.WithFileSystem(f))
	m := b.machine()
	f.n = f.step + 1
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	j, err := m.Join(ctx, b.options())
	if err != nil || !j.Confirmed || b.Nodes() != 1 {
		t.Errorf("joined %+v, error %v, %d nodes", j, err, b.Nodes())
	}
}

// TestNothingIsSentBeforeTheRequestIsOnDisk keeps a key that was seen from being
// lost: with no room for it, nobody hears of it.
func TestNothingIsSentBeforeTheRequestIsOnDisk(t *testing.T) {
	b := newBench(t)
	_ = b.dir.Close()
	b.open(state.WithFileSystem(&faulty{n: 1, fate: func(string) error { return syscall.ENOSPC }}))
	if _, err := agent.New(agent.Config{State: b.dir, FirstBundle: b.Bundle(), Logger: quiet()}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v", err)
	}
	if len(b.Joins()) > 0 {
		t.Error("a request was sent that is not on disk")
	}
}

// TestEveryRenameIsOfASyncedFileInASyncedDirectory reads the trace of a whole
// join: what a power cut needs, and a killed process does not show.
func TestEveryRenameIsOfASyncedFileInASyncedDirectory(t *testing.T) {
	b := newBench(t)
	_ = b.dir.Close()
	f := &faulty{}
	b.open(state.WithFileSystem(f))
	o := b.options()
	o.Outputs = outputsIn(filepath.Join(t.TempDir(), "out"))
	if _, err := b.machine().Join(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	synced := map[string]bool{}
	renames := 0
	for i, line := range f.trace {
		var from, to string
		if _, err := fmt.Sscanf(line, "sync %s", &from); err == nil {
			synced[from] = true
			continue
		}
		if _, err := fmt.Sscanf(line, "symlink %s", &from); err == nil {
			synced[from] = true // A link has no content of its own.
			continue
		}
		if _, err := fmt.Sscanf(line, "rename %s %s", &from, &to); err != nil {
			continue
		}
		renames++
		if !synced[from] {
			t.Errorf("%s was renamed before it was synced", from)
		}
		want := []string{"open " + filepath.Dir(to), "sync " + filepath.Dir(to)}
		if i+2 >= len(f.trace) || f.trace[i+1] != want[0] || f.trace[i+2] != want[1] {
			t.Errorf("after the rename to %s its directory was not synced", to)
		}
	}
	if renames < 7 {
		t.Errorf("%d renames: the trace is not that of a join", renames)
	}
}

// TestLostAnswerGetsTheSameCertificate cuts the connection after the service
// admitted the machine.
func TestLostAnswerGetsTheSameCertificate(t *testing.T) {
	b := newBench(t)
	var lost string
	b.OnJoin(func(w http.ResponseWriter, j *agenttest.Join) {
		a := b.Admit(j)
		if lost == "" {
			lost = a.Certificates[0]
			panic(http.ErrAbortHandler)
		}
		b.Write(w, a)
	})
	j := b.mustJoin()
	if got := wire.EncodeBase64(j.Identity.Chain[0]); got != lost {
		t.Error("another certificate than the lost one")
	}
	if waited := b.clock.Now().Sub(agenttest.Start); waited > 15*time.Second {
		t.Errorf("waited %v", waited)
	}
}
