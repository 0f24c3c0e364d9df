//go:build !linux

package agent

import "time"

// Elapsed is the time since the process started.
func (SystemClock) Elapsed() time.Duration { return time.Since(processStart) }
