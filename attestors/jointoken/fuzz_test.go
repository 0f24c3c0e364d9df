package jointoken_test

import (
	"strings"
	"testing"

	"github.com/better-compute/join-operator/attestors/jointoken"
)

// FuzzParse must take a token in its one spelling only.
func FuzzParse(f *testing.F) {
	text := jointoken.Generate().Text()
	for _, seed := range []string{text, strings.ToUpper(text), " " + text, text + "\n", text + "\x00", text[:len(text)-1], strings.Replace(text, "bcjt", "bcjT", 1), "bcjt___", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		token, err := jointoken.Parse(text)
		if err != nil {
			if strings.Contains(err.Error(), text) && len(text) > 20 {
				t.Error("the error repeats what may be a secret")
			}
			return
		}
		if token.Text() != text {
			t.Errorf("%q is taken for %q", text, token.Text())
		}
	})
}
