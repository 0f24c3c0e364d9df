package httpapi

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/better-compute/join-operator/api/wire"
)

// TestEnvelopesThatAreNotReadAreInvalidInput is the list of bad bodies. None of
// them reaches the service.
func TestEnvelopesThatAreNotReadAreInvalidInput(t *testing.T) {
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		t.Error("it reached the service")
		return &wire.Answer{}, nil
	}}, nil)
	good := `{"protocol":1,"role":"node","csr":"AAAA"}`
	sealed := `{"protocol":1,"role":"node","csr":"AAAA","kid":"k","sealed":"AAAA"}`
	for name, c := range map[string]struct {
		body, detail string
		code         wire.Code
	}{
		"empty":                 {"", "body", wire.InvalidInput},
		"white space":           {" \n", "body", wire.InvalidInput},
		"not JSON":              {"join me", "body", wire.InvalidInput},
		"a list":                {"[" + good + "]", "body", wire.InvalidInput},
		"a string":              {`"join"`, "body", wire.InvalidInput},
		"truncated":             {good[:len(good)-1], "body", wire.InvalidInput},
		"two objects":           {good + good, "body", wire.InvalidInput},
		"trailing text":         {good + "x", "body", wire.InvalidInput},
		"a NUL behind it":       {good + "\x00", "body", wire.InvalidInput},
		"UTF-16":                {"\xff\xfe{\x00", "body", wire.InvalidInput},
		"an unknown field":      {strings.Replace(good, "{", `{"x":1,`, 1), "body", wire.InvalidInput},
		"a field twice":         {strings.Replace(good, "{", `{"role":"site",`, 1), "body", wire.InvalidInput},
		"a field in capitals":   {strings.Replace(good, "role", "Role", 1), "body", wire.InvalidInput},
		"all in capitals":       {strings.ToUpper(good), "body", wire.InvalidInput},
		"deep nesting":          {`{"protocol":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + "}", "body", wire.InvalidInput},
		"deep in unknown field": {`{"x":` + strings.Repeat(`{"x":`, 20_000) + "1" + strings.Repeat("}", 20_001), "body", wire.InvalidInput},
		"a number for the role": {strings.Replace(good, `"node"`, "1", 1), "body", wire.InvalidInput},
		"protocol 0":            {strings.Replace(good, ":1,", ":0,", 1), "protocol", wire.InvalidInput},
		"protocol 2":            {strings.Replace(good, ":1,", ":2,", 1), "protocol", wire.InvalidInput},
		"protocol 1.5":          {strings.Replace(good, ":1,", ":1.5,", 1), "body", wire.InvalidInput},
		"a text for protocol":   {strings.Replace(good, ":1,", `:"1",`, 1), "body", wire.InvalidInput},
		"no protocol":           {strings.Replace(good, `"protocol":1,`, "", 1), "protocol", wire.InvalidInput},
		"no role":               {strings.Replace(good, `"role":"node",`, "", 1), "role", wire.InvalidInput},
		"another role":          {strings.Replace(good, "node", "root", 1), "role", wire.InvalidInput},
		"a role in capitals":    {strings.Replace(good, "node", "Node", 1), "role", wire.InvalidInput},
		"no CSR":                {strings.Replace(good, `,"csr":"AAAA"`, "", 1), "csr", wire.InvalidInput},
		"an empty CSR":          {strings.Replace(good, "AAAA", "", 1), "csr", wire.InvalidInput},
		"base64url":             {strings.Replace(good, "AAAA", "__-_", 1), "csr", wire.InvalidInput},
		"no padding":            {strings.Replace(good, "AAAA", "AAA", 1), "csr", wire.InvalidInput},
		"line breaks":           {strings.Replace(good, "AAAA", `AA\nAA`, 1), "csr", wire.InvalidInput},
		"trailing bits":         {strings.Replace(good, "AAAA", "AAB=", 1), "csr", wire.InvalidInput},
		"sealed without kid":    {strings.Replace(sealed, `"kid":"k",`, "", 1), "sealed", wire.InvalidInput},
		"kid without sealed":    {strings.Replace(sealed, `,"sealed":"AAAA"`, "", 1), "sealed", wire.InvalidInput},
		"sealed not base64":     {strings.Replace(sealed, `"sealed":"AAAA"`, `"sealed":"?"`, 1), "sealed", wire.InvalidInput},
		"state not base64":      {strings.Replace(good, "}", `,"state":"?"}`, 1), "state", wire.InvalidInput},
		"one byte too many":     {good + strings.Repeat(" ", wire.MaxBody+1-len(good)), "", wire.TooLarge},
		"2 MiB":                 {strings.Repeat("x", 2<<20), "", wire.TooLarge},
	} {
		for _, framing := range []string{"with a length", "chunked"} {
			t.Run(name+" "+framing, func(t *testing.T) {
				var body io.Reader = strings.NewReader(c.body)
				if framing == "chunked" {
					body = struct{ io.Reader }{body} // of unknown length
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, body))
				var p wire.Problem
				if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
					t.Fatal(err)
				}
				if p.Code != c.code || w.Code != c.code.Status() || w.Header().Get("Content-Type") != wire.MediaTypeProblem {
					t.Errorf("answered %d %s", w.Code, w.Body)
				}
				if field, _, _ := strings.Cut(p.Detail, ":"); field != c.detail || len(p.Detail) > 200 {
					t.Errorf("detail %q, want one about %q", p.Detail, c.detail)
				}
			})
		}
	}
}

func TestTheLargestBodyIsRead(t *testing.T) {
	read := false
	h := scripted(t, script{join: func(context.Context, *wire.Join, netip.Addr) (*wire.Answer, error) {
		read = true
		return &wire.Answer{}, nil
	}}, nil)
	body := envelope(t)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(body+strings.Repeat(" ", wire.MaxBody-len(body)))))
	if !read || w.Code != http.StatusOK {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// TestTheOrderOfTheFirstChecks has several things wrong at once: size before
// method, method before the envelope.
func TestTheOrderOfTheFirstChecks(t *testing.T) {
	h := scripted(t, script{}, nil)
	large := strings.Repeat("x", wire.MaxBody+1)
	for _, c := range []struct {
		method, path, body string
		code               wire.Code
		allow              string
	}{
		{http.MethodPut, wire.PathJoin, large, wire.TooLarge, ""},
		{http.MethodGet, wire.PathConfirm, large, wire.TooLarge, ""},
		{http.MethodPut, wire.PathJoin, "not JSON", wire.MethodNotAllowed, "POST"},
		{http.MethodGet, wire.PathJoin, "", wire.MethodNotAllowed, "POST"},
		{http.MethodHead, wire.PathJoin, "", wire.MethodNotAllowed, "POST"},
		{http.MethodOptions, wire.PathConfirm, "", wire.MethodNotAllowed, "POST"},
		{"post", wire.PathJoin, "", wire.MethodNotAllowed, "POST"},
		{http.MethodPost, wire.PathBundle, "", wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodPost, wire.PathRotations, "", wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodDelete, wire.PathCRL, "", wire.MethodNotAllowed, "GET, HEAD"},
		{http.MethodPost, wire.PathJoin, "{}", wire.InvalidInput, ""},
		{http.MethodPost, wire.PathConfirm, "{}", wire.InvalidInput, ""},
		{http.MethodPost, wire.PathRenew, "{}", wire.NotFound, ""},
		{http.MethodPost, wire.PathCommands, "{}", wire.NotFound, ""},
		{http.MethodPost, wire.PathJoin + "/", "{}", wire.NotFound, ""},
		{http.MethodPost, "/v1//join", "{}", wire.NotFound, ""},
		{http.MethodPost, "/V1/JOIN", "{}", wire.NotFound, ""},
		{http.MethodGet, "/", "", wire.NotFound, ""},
		{http.MethodGet, "/metrics", "", wire.NotFound, ""},
		{http.MethodGet, wire.PathBundle, "", wire.Unavailable, ""},
		{http.MethodGet, wire.PathRotations, "", wire.InvalidInput, ""},
		{http.MethodGet, wire.PathRotations + "?after=-1", "", wire.InvalidInput, ""},
		{http.MethodGet, wire.PathRotations + "?after=1&after=2", "", wire.InvalidInput, ""},
		{http.MethodGet, wire.PathRotations + "?after=99999999999", "", wire.InvalidInput, ""},
		{http.MethodGet, wire.PathRotations + "?after=%zz", "", wire.InvalidInput, ""},
		{http.MethodGet, wire.PathCRL + "/zz", "", wire.NotFound, ""},
		{http.MethodGet, wire.PathCRL + "/AA", "", wire.NotFound, ""},
		{http.MethodGet, wire.PathCRL + "/a", "", wire.NotFound, ""},
		{http.MethodGet, wire.PathCRL + "/", "", wire.NotFound, ""},
		{http.MethodGet, wire.PathCRL + "/" + strings.Repeat("aa", 65), "", wire.NotFound, ""},
	} {
		for _, known := range []bool{true, false} {
			t.Run(c.method+" "+c.path, func(t *testing.T) {
				r := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body))
				if !known {
					r.ContentLength = -1
				}
				w := httptest.NewRecorder()
				h.ServeHTTP(w, r)
				var p wire.Problem
				if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil {
					t.Fatalf("%d %q: %v", w.Code, w.Body, err)
				}
				if p.Code != c.code || w.Code != c.code.Status() || w.Header().Get("Allow") != c.allow {
					t.Errorf("answered %d %s, Allow %q; want %s, %q", w.Code, w.Body, w.Header().Get("Allow"), c.code, c.allow)
				}
			})
		}
	}
}

// FuzzJoin sends any body: it must be answered, and an answer must be a problem
// unless the envelope decodes.
func FuzzJoin(f *testing.F) {
	h := scripted(f, script{join: func(_ context.Context, j *wire.Join, _ netip.Addr) (*wire.Answer, error) {
		if len(j.CSR) == 0 || !j.Role.Valid() || (j.KeyID != "" || len(j.Sealed) > 0) && !j.HasSealed {
			f.Errorf("it reached the service as %+v", j)
		}
		return &wire.Answer{Outcome: wire.OutcomePending}, nil
	}}, nil)
	f.Add([]byte(`{"protocol":1,"role":"node","csr":"AAAA","kid":"k","sealed":"","state":""}`))
	f.Add([]byte(`{"protocol":1,"role":"node","csr":"AAAA","attestor":null}`))
	f.Add([]byte(`{"protocol":1,"role":"node","csr":"AAAA","role":"site"}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, body []byte) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, wire.PathJoin, strings.NewReader(string(body))))
		if w.Code != http.StatusOK && w.Code != http.StatusBadRequest && w.Code != http.StatusRequestEntityTooLarge {
			t.Errorf("answered %d %s", w.Code, w.Body)
		}
	})
}
