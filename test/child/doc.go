// Package child starts the servers that tests need as processes which end with
// the test binary, however it ends: by returning, by a panic, by a time-out or by
// kill -9. A watchdog process holds the reading end of a pipe; when the test
// binary is gone the pipe closes, and the watchdog ends what was started and
// removes its folders.
package child
