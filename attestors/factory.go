package attestors

import (
	"crypto/tls"
	"encoding/json"
)

// Environment is what a process lends to attestors that it builds of
// configuration. Everything in it is optional: a manager, which only checks that a
// configuration is sound, lends nothing.
type Environment struct {
	// ClientCertificate is what the service shows to endpoints outside of it. It is
	// asked at each handshake, so that a certificate that was renewed is shown at
	// once.
	ClientCertificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
}

// Factory builds an attestor with the given id of its type's part of an
// AttestorConfig's spec, with all references resolved. It does no I/O. What is
// wrong with the configuration it says as a [*FieldError].
type Factory func(id string, spec json.RawMessage, env Environment) (*Attestor, error)

// FieldError says what is wrong in which field of a configuration. It is shown to
// people.
type FieldError struct {
	// Field is the path from the part that was given, for example "url".
	Field string
	// Reason says what is wrong and what would be right, without the field's name.
	Reason string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

// Within is the same error, told from further out: the field's path begins with
// parent.
func (e *FieldError) Within(parent string) *FieldError {
	if e.Field == "" {
		return &FieldError{parent, e.Reason}
	}
	return &FieldError{parent + "." + e.Field, e.Reason}
}
