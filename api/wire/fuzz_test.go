package wire_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/api/wire"
)

// FuzzDecodeJoin must take only what a machine of this protocol could have sent:
// what it decodes encodes and decodes to the same, and its errors repeat no value.
func FuzzDecodeJoin(f *testing.F) {
	for _, seed := range []string{
		`{"protocol":1,"role":"node","csr":"AAAA"}`,
		`{"protocol":1,"attestor":"tpm","role":"site","csr":"AAAA","kid":"k","sealed":"","state":"AA=="}`,
		`{"protocol":1,"role":"node","role":"site","csr":"AAAA"}`,
		`{"protocol":1,"Role":"node","csr":"AAAA"}`,
		`{"protocol":1,"role":"node","csr":"AAAA","kid":null,"sealed":null}`,
		`{"protocol":1,"role":"node","csr":"AAB="}`,
		`{"protocol":1,"role":"node","csr":"AAAA"}{}`,
		`[{}]`, `{`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		j, err := wire.DecodeJoin(body)
		if err != nil {
			var field *wire.FieldError
			if !errors.As(err, &field) || j != nil || len(err.Error()) > 200 {
				t.Fatalf("refused with %v, %v", j, err)
			}
			return
		}
		if !j.Role.Valid() || len(j.CSR) == 0 || !j.HasSealed && (j.KeyID != "" || len(j.Sealed) > 0) || !bytes.HasSuffix(bytes.TrimSpace(body), []byte("}")) {
			t.Fatalf("took %q as %+v", body, j)
		}
		encoded, err := json.Marshal(j)
		if err != nil {
			t.Fatal(err)
		}
		again, err := wire.DecodeJoin(encoded)
		if err != nil {
			t.Fatalf("%s: %v", encoded, err)
		}
		// What is absent and what is empty are one but for the sealed part.
		if again.Attestor != j.Attestor && !strings.ContainsRune(j.Attestor, '\uFFFD') || again.Role != j.Role || !bytes.Equal(again.CSR, j.CSR) ||
			again.HasSealed != j.HasSealed || !bytes.Equal(again.Sealed, j.Sealed) || !bytes.Equal(again.State, j.State) {
			t.Errorf("%+v became %+v", j, again)
		}
	})
}
