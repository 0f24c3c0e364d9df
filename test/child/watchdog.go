package child

import (
	"fmt"
	"io"
	"os/exec"
	"sync"
	"syscall"
)

// watchdogScript reads what to end and what to remove, one a line, until its
// standard input closes. A process that ended is taken off the list, since its
// number may be somebody else's by then.
const watchdogScript = `
procs=" "
while read -r what a; do
  case $what in
    run) procs="$procs$a " ;;
    gone) procs=$(printf '%s' "$procs" | sed "s/ $a:[A-Z]* / /") ;;
    dir) set -- "$@" "$a" ;;
    dropped) n=$#; while [ "$n" -gt 0 ]; do d=$1; shift; [ "$d" = "$a" ] || set -- "$@" "$d"; n=$((n-1)); done ;;
  esac
done
for p in $procs; do kill -"${p#*:}" "${p%%:*}"; done 2>/dev/null
for p in $procs; do
  n=0
  while kill -0 "${p%%:*}" 2>/dev/null && [ "$n" -lt 100 ]; do sleep 0.1; n=$((n+1)); done
  kill -KILL "${p%%:*}" 2>/dev/null
done
for d in "$@"; do rm -rf -- "$d"; done
`

// watchdog is the one process that outlives the test binary.
type watchdog struct {
	mu   sync.Mutex
	pipe io.WriteCloser
}

// startWatchdog starts it once for the whole test binary: it must be there
// before the first server, and it can be told of any number of them.
var startWatchdog = sync.OnceValues(func() (*watchdog, error) {
	cmd := exec.Command("/bin/sh", "-c", watchdogScript, "watchdog")
	// A session of its own: Ctrl-C in a terminal reaches the test binary alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the watchdog of test servers: %w", err)
	}
	return &watchdog{pipe: pipe}, nil
})

func (w *watchdog) tell(format string, args ...any) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := fmt.Fprintf(w.pipe, format+"\n", args...)
	return err
}
