package decide

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// person reads what a plugin shows, and types an answer whenever it asks.
type person struct {
	keyboard *os.File
	answers  []func() string
	asked    int
}

// newPerson gives a person with a real terminal, which is the plugin's input.
func newPerson(t *testing.T, answers ...func() string) (*person, *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return &person{keyboard: keyboard, answers: answers}, tty
}

func (p *person) Write(b []byte) (int, error) {
	text := string(b)
	if !strings.HasSuffix(text, "[y/N] ") && !strings.HasSuffix(text, "number: ") {
		return len(b), nil
	}
	p.asked++
	answer := "\x04" // end of input
	if p.asked <= len(p.answers) {
		answer = p.answers[p.asked-1]()
	}
	if _, err := p.keyboard.WriteString(answer); err != nil {
		return 0, err
	}
	return len(b), nil
}

// done checks that the person was asked as often as they have answers.
func (p *person) done(t *testing.T) {
	t.Helper()
	if p.asked != len(p.answers) {
		t.Errorf("was asked %d times, want %d", p.asked, len(p.answers))
	}
}
