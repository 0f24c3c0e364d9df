package agent

import (
	"time"

	"golang.org/x/sys/unix"
)

// Elapsed is the time since the machine started, suspended or not: CLOCK_BOOTTIME
// (clock_gettime(2)). Go's own monotonic time stands still in a suspended machine.
func (SystemClock) Elapsed() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return time.Since(processStart)
	}
	return time.Duration(t.Nano())
}
