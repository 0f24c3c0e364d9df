package child

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Command is a server to start.
type Command struct {
	// Path is the binary; Args are its arguments without its name.
	Path string
	Args []string
	// Env is added to this process's environment.
	Env []string
	// Log is the file that standard output and error are appended to.
	Log string
	// Credential is the user to run as; nil is this process's.
	Credential *syscall.Credential
	// Stop is the name of the signal that ends the server at once without loss to
	// others: "TERM" where empty.
	Stop string
}

// Process is a server that runs.
type Process struct {
	name string
	log  string
	stop syscall.Signal
	cmd  *exec.Cmd
	done chan struct{}

	mu  sync.Mutex
	err error
}

var signals = map[string]syscall.Signal{
	"TERM": syscall.SIGTERM,
	"KILL": syscall.SIGKILL,
	"QUIT": syscall.SIGQUIT,
	"INT":  syscall.SIGINT,
}

// Start starts c. The process ends with this one at the latest.
func Start(c Command) (*Process, error) {
	if c.Stop == "" {
		c.Stop = "TERM"
	}
	sig, ok := signals[c.Stop]
	if !ok {
		return nil, fmt.Errorf("unknown signal %q", c.Stop)
	}
	w, err := startWatchdog()
	if err != nil {
		return nil, err
	}
	log, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &Process{name: filepath.Base(c.Path), log: c.Log, stop: sig, done: make(chan struct{})}
	p.cmd = exec.Command(c.Path, c.Args...)
	p.cmd.Env = append(os.Environ(), c.Env...)
	// A file, not a pipe: a pipe would keep "go test" waiting for its other end.
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.Credential}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	pid := p.cmd.Process.Pid
	if err := w.tell("run %d:%s", pid, c.Stop); err != nil {
		_ = p.cmd.Process.Kill()
		return nil, fmt.Errorf("tell the watchdog of %s: %w", p.name, err)
	}
	go func() {
		err := p.cmd.Wait()
		_ = w.tell("gone %d", pid)
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(p.done)
	}()
	return p, nil
}

// PID is the process's number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends a signal, for instance SIGSTOP to pause the server.
func (p *Process) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Stop ends the process as its Command says and waits for it; after ten seconds
// it kills.
func (p *Process) Stop() {
	_ = p.cmd.Process.Signal(p.stop)
	select {
	case <-p.done:
	case <-time.After(10 * time.Second):
		p.Kill()
	}
}

// Kill is kill -9, and waits for the end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Await polls ready until it returns nil. It gives up when ctx ends or when the
// process does, with the end of the log in the error.
func (p *Process) Await(ctx context.Context, ready func(context.Context) error) error {
	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			p.mu.Lock()
			defer p.mu.Unlock()
			return fmt.Errorf("%s ended (%s):\n%s", p.name, fmt.Sprint(p.err), tail(p.log))
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w:\n%s", p.name, err, tail(p.log))
		case <-tick.C:
		}
	}
}

// tail is the last lines of a log.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(string(bytes.TrimSpace(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-25):], "\n")
}

// TempDir makes a folder that is removed when this process has ended, after the
// servers that use it. It belongs to the given user where one is given. RemoveDir
// removes it earlier.
func TempDir(pattern string, owner *syscall.Credential) (string, error) {
	w, err := startWatchdog()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", pattern)
	if err != nil {
		return "", err
	}
	if owner != nil {
		if err := os.Chown(dir, int(owner.Uid), int(owner.Gid)); err != nil {
			return "", err
		}
	}
	return dir, w.tell("dir %s", dir)
}

// RemoveDir removes a folder made by TempDir.
func RemoveDir(dir string) error {
	w, err := startWatchdog()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	return w.tell("dropped %s", dir)
}
