package wire

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"

	kjson "sigs.k8s.io/json"
)

// Join is the body of POST /v1/join after decoding. Only Role and CSR are
// required.
type Join struct {
	// Attestor is the id as sent; empty means join-token. The empty form, not
	// the default, is what the sealed part is bound to.
	Attestor string
	Role     Role
	// CSR is a DER PKCS#10 request (RFC 2986). Only its public key is used.
	CSR []byte
	// KeyID names the sealing key of Sealed; both are present or neither.
	KeyID string
	// Sealed is enc || ciphertext of HPKE (RFC 9180), opened it is a [Sealed].
	Sealed []byte
	// HasSealed tells an empty sealed part (a refusal) from an absent one.
	HasSealed bool
	// State is what a challenge handed out, as it was handed out.
	State []byte
}

type joinJSON struct {
	Protocol int     `json:"protocol"`
	Attestor string  `json:"attestor,omitempty"`
	Role     Role    `json:"role"`
	CSR      string  `json:"csr"`
	KeyID    *string `json:"kid,omitempty"`
	Sealed   *string `json:"sealed,omitempty"`
	State    *string `json:"state,omitempty"`
}

// FieldError says which field of an envelope could not be read and why. It is
// safe to show to a machine: it speaks only of what is read before an attestor
// is chosen, and never repeats a value.
type FieldError struct {
	// Field is the name on the wire; empty for the body as a whole.
	Field  string
	Reason string
}

func (e *FieldError) Error() string {
	if e.Field == "" {
		return "body: " + e.Reason
	}
	return e.Field + ": " + e.Reason
}

// MarshalJSON writes the envelope as a machine sends it.
func (j *Join) MarshalJSON() ([]byte, error) {
	out := joinJSON{Protocol: Protocol, Attestor: j.Attestor, Role: j.Role, CSR: EncodeBase64(j.CSR)}
	if j.KeyID != "" || j.HasSealed || len(j.Sealed) > 0 {
		s := EncodeBase64(j.Sealed)
		out.KeyID, out.Sealed = &j.KeyID, &s
	}
	if len(j.State) > 0 {
		s := EncodeBase64(j.State)
		out.State = &s
	}
	return json.Marshal(out)
}

// DecodeJoin reads an envelope strictly: no unknown, doubled or differently
// cased names, nothing after it. The CSR is decoded from base64 but not parsed.
// Every error is a *FieldError and means INVALID_INPUT.
func DecodeJoin(body []byte) (*Join, error) {
	var in joinJSON
	if err := decodeStrict(body, &in); err != nil {
		return nil, err
	}
	if in.Protocol != Protocol {
		return nil, &FieldError{"protocol", fmt.Sprintf("must be %d", Protocol)}
	}
	if !in.Role.Valid() {
		return nil, &FieldError{"role", "must be node, site or ramdisk"}
	}
	j := &Join{Attestor: in.Attestor, Role: in.Role}
	var err error
	if j.CSR, err = decodeField("csr", in.CSR); err != nil {
		return nil, err
	}
	if len(j.CSR) == 0 {
		return nil, &FieldError{"csr", "is required"}
	}
	if in.State != nil {
		if j.State, err = decodeField("state", *in.State); err != nil {
			return nil, err
		}
	}
	if j.KeyID, j.Sealed, j.HasSealed, err = decodeSealedFields(in.KeyID, in.Sealed); err != nil {
		return nil, err
	}
	return j, nil
}

// decodeSealedFields reads the two fields that come together or not at all.
func decodeSealedFields(kid, sealed *string) (string, []byte, bool, error) {
	if (kid == nil) != (sealed == nil) {
		return "", nil, false, &FieldError{"sealed", "kid and sealed come together"}
	}
	if sealed == nil {
		return "", nil, false, nil
	}
	b, err := decodeField("sealed", *sealed)
	return *kid, b, true, err
}

// Sealed is the plaintext of a join's sealed part: all that is secret or
// private, so that the gateway sees none of it. Every field is optional.
type Sealed struct {
	Token string `json:"token,omitempty"`
	// Evidence is the attestor's own payload.
	Evidence []byte `json:"-"`
	Claims   Claims `json:"claims,omitzero"`
}

// Claims is what a machine says of itself and nobody has proved.
type Claims struct {
	ProductUUID  string   `json:"productUUID,omitempty"`
	SerialNumber string   `json:"serialNumber,omitempty"`
	MACAddresses []string `json:"macAddresses,omitempty"`
	// HardwareKeySHA256 is 64 lower-case hexadecimal digits.
	HardwareKeySHA256 string `json:"hardwareKeySHA256,omitempty"`
}

type sealedJSON struct {
	Token    string `json:"token,omitempty"`
	Evidence string `json:"evidence,omitempty"`
	Claims   Claims `json:"claims,omitzero"`
}

// MarshalJSON writes the plaintext as a machine seals it.
func (s *Sealed) MarshalJSON() ([]byte, error) {
	return json.Marshal(sealedJSON{s.Token, EncodeBase64(s.Evidence), s.Claims})
}

// DecodeSealed reads the plaintext as strictly as the envelope. Its errors must
// not reach a machine: what is wrong here is a refusal.
func DecodeSealed(plaintext []byte) (*Sealed, error) {
	var in sealedJSON
	if err := decodeStrict(plaintext, &in); err != nil {
		return nil, err
	}
	ev, err := decodeField("evidence", in.Evidence)
	if err != nil {
		return nil, err
	}
	return &Sealed{Token: in.Token, Evidence: ev, Claims: in.Claims}, nil
}

// EncodeBase64 is the protocol's base64: standard alphabet, padded (RFC 4648 section 4).
func EncodeBase64(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// DecodeBase64 is the strict inverse of [EncodeBase64]: line breaks and
// non-zero trailing bits, which the standard decoder lets pass, are errors.
func DecodeBase64(s string) ([]byte, error) {
	if strings.ContainsAny(s, "\r\n") {
		return nil, base64.CorruptInputError(strings.IndexAny(s, "\r\n"))
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}

func decodeField(name, s string) ([]byte, error) {
	b, err := DecodeBase64(s)
	if err != nil {
		return nil, &FieldError{name, "is not padded standard base64"}
	}
	return b, nil
}

func decodeStrict(data []byte, v any) error {
	strict, err := kjson.UnmarshalStrict(data, v, kjson.DisallowDuplicateFields, kjson.DisallowUnknownFields)
	if err != nil {
		return &FieldError{Reason: "is not one JSON object of the protocol's form"}
	}
	if len(strict) > 0 {
		return &FieldError{Reason: "has an unknown or doubled field"}
	}
	return nil
}
