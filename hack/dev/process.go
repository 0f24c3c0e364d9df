package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a part of the system that runs by itself.
type process struct {
	name string
	path string
	args []string
	// attr says as whom it runs; nil is as the launcher.
	attr *syscall.SysProcAttr
	// prepare is done before it starts, if anything.
	prepare func() error
	// stop is the signal that ends it in good order.
	stop syscall.Signal
	// ready tells whether it does its work.
	ready func(context.Context) error
}

// readyTimeout is how long one process may take to be ready.
const readyTimeout = 60 * time.Second

func (s *system) pidFile(name string) string { return s.path("run", name+".pid") }

// pid is the number of a process of ours, or 0 where it does not run. The file
// holds its start time too: after a crash or a restart of the machine the number
// may be somebody else's.
func (s *system) pid(name string) int {
	b, err := os.ReadFile(s.pidFile(name))
	if err != nil {
		return 0
	}
	var pid int
	var started string
	if _, err := fmt.Sscan(string(b), &pid, &started); err != nil || pid <= 1 {
		return 0
	}
	if now, err := startTime(pid); err != nil || now != started {
		return 0
	}
	return pid
}

// startTime is when a process started, in clock ticks since this boot, with the
// boot's id. A zombie counts as gone.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return "", errors.New("ended")
	}
	return fields[19] + "@" + string(bytes.TrimSpace(boot)), nil
}

// start starts a process that does not run, and waits until it is ready.
func (s *system) start(ctx context.Context, p process) error {
	begun := time.Now()
	pid := s.pid(p.name)
	if pid == 0 {
		if p.prepare != nil {
			if err := p.prepare(); err != nil {
				return err
			}
		}
		var err error
		if pid, err = s.spawn(p); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	told := time.Now()
	for {
		err := p.ready(ctx)
		if err == nil {
			s.say("%s is ready (pid %d, %.1f s)", p.name, pid, time.Since(begun).Seconds())
			return nil
		}
		if s.pid(p.name) == 0 {
			return fmt.Errorf("%s ended:\n%s", p.name, s.tail(p.name))
		}
		if time.Since(told) > 5*time.Second {
			s.say("waiting for %s: %v", p.name, err)
			told = time.Now()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w\n%s", p.name, err, s.tail(p.name))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// spawn starts a process that outlives the launcher.
func (s *system) spawn(p process) (int, error) {
	log, err := os.OpenFile(s.path("log", p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = s.root
	if p.attr != nil {
		cmd.Dir = "/" // another user may not enter the repository
	}
	// A process that finds the administrator's kubeconfig by itself would not have
	// the rights that it has in production.
	cmd.Env = append(os.Environ(), "KUBECONFIG=/nonexistent", "DATABASE_URL=")
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if p.attr != nil {
		*cmd.SysProcAttr = *p.attr
	}
	cmd.SysProcAttr.Setsid = true
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	pid := cmd.Process.Pid
	// Collect it if it ends while the launcher still runs.
	go func() { _ = cmd.Wait() }()
	started, err := startTime(pid)
	if err != nil {
		return 0, fmt.Errorf("%s ended at once:\n%s", p.name, s.tail(p.name))
	}
	return pid, writeFile(s.pidFile(p.name), fmt.Appendf(nil, "%d %s\n", pid, started), 0o644)
}

// end ends a process and waits until it is gone; what does not go is killed.
func (s *system) end(p process, sig syscall.Signal) error {
	pid := s.pid(p.name)
	if pid == 0 {
		_ = os.Remove(s.pidFile(p.name))
		return nil
	}
	if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	// One that is paused takes no signal but this and SIGKILL.
	_ = syscall.Kill(pid, syscall.SIGCONT)
	for begun := time.Now(); s.pid(p.name) != 0; {
		if time.Since(begun) > 10*time.Second {
			s.say("%s does not stop: killing it", p.name)
			_ = syscall.Kill(pid, syscall.SIGKILL)
			begun = time.Now()
		}
		time.Sleep(10 * time.Millisecond)
	}
	return os.Remove(s.pidFile(p.name))
}

func (s *system) signal(p process, sig syscall.Signal) error {
	pid := s.pid(p.name)
	if pid == 0 {
		return errors.New("it does not run")
	}
	return syscall.Kill(pid, sig)
}

func (s *system) status() error {
	processes, err := s.processes()
	if err != nil {
		return err
	}
	for _, p := range processes {
		state := "stopped"
		if pid := s.pid(p.name); pid != 0 {
			state = "pid " + strconv.Itoa(pid)
		}
		fmt.Printf("%-24s %s\n", p.name, state)
	}
	return nil
}

// tail is the end of a process's log.
func (s *system) tail(name string) string {
	b, err := os.ReadFile(s.path("log", name+".log"))
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(string(bytes.TrimSpace(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}
