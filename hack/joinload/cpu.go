package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// processes are the pids of the system's parts: one or more each.
type processes map[string][]int

// parts are those whose CPU a join is charged with, by the names of pid files.
var parts = map[string]string{"gateway": "gateway*.pid", "join service": "joinsvc*.pid", "Postgres": "postgres*.pid"}

func findProcesses(runDir string) (processes, error) {
	found := processes{}
	for part, pattern := range parts {
		files, err := filepath.Glob(filepath.Join(runDir, pattern))
		if err != nil {
			return nil, err
		}
		if len(files) == 0 {
			return nil, fmt.Errorf("no %s in %s: is the dev system up (make dev-up)?", pattern, runDir)
		}
		for _, f := range files {
			raw, err := os.ReadFile(f)
			if err != nil {
				return nil, err
			}
			first, _, _ := strings.Cut(strings.TrimSpace(string(raw)), "\n")
			pid, err := strconv.Atoi(strings.Fields(first)[0])
			if err != nil {
				return nil, fmt.Errorf("%s: %w", f, err)
			}
			found[part] = append(found[part], pid)
		}
	}
	return found, nil
}

// cpuTimes is user and system time by part, and the program's own.
type cpuTimes map[string]time.Duration

const self = "joinload"

func (p processes) read() cpuTimes {
	t := cpuTimes{}
	children := childrenByParent()
	for part, pids := range p {
		for _, pid := range pids {
			t[part] += treeTime(pid, children)
		}
	}
	var ru syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &ru) == nil {
		t[self] = time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
	}
	return t
}

func (t cpuTimes) since(before cpuTimes) cpuTimes {
	d := cpuTimes{}
	for part, v := range t {
		d[part] = v - before[part]
	}
	return d
}

// treeTime sums a process, its living descendants, and the dead ones that it
// waited for: Postgres works in children.
func treeTime(pid int, children map[int][]int) time.Duration {
	s, ok := readStat(pid)
	if !ok {
		return 0
	}
	total := s.own + s.waited
	for _, c := range children[pid] {
		total += treeTime(c, children)
	}
	return total
}

type stat struct {
	parent      int
	own, waited time.Duration
}

// clockTick is USER_HZ, which Linux fixes at 100 for user space (proc(5)).
const clockTick = time.Second / 100

func readStat(pid int) (stat, bool) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, false
	}
	// The command's name stands in parentheses and may hold anything.
	_, rest, ok := strings.Cut(string(raw[max(0, strings.LastIndexByte(string(raw), ')')):]), ") ")
	f := strings.Fields(rest)
	if !ok || len(f) < 15 {
		return stat{}, false
	}
	ticks := func(i int) time.Duration {
		n, _ := strconv.ParseInt(f[i], 10, 64)
		return time.Duration(n) * clockTick
	}
	parent, _ := strconv.Atoi(f[1])
	return stat{parent: parent, own: ticks(11) + ticks(12), waited: ticks(13) + ticks(14)}, true
}

func childrenByParent() map[int][]int {
	children := map[int][]int{}
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil {
			continue
		}
		if s, ok := readStat(pid); ok && !slices.Contains(children[s.parent], pid) {
			children[s.parent] = append(children[s.parent], pid)
		}
	}
	return children
}
