package jointoken

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"hash/crc32"
	"strings"
)

const (
	tokenPrefix  = "bcjt"
	idLength     = 12
	secretLength = 32
	sumLength    = 8
	tokenLength  = len(tokenPrefix) + 1 + idLength + 1 + secretLength + 1 + sumLength
)

// alphabet is base32 of RFC 4648 section 6 in lower case.
var alphabet = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// ErrMalformed is returned for a text that is no token. It says nothing of what
// was wrong with it.
var ErrMalformed = errors.New("not a join token")

// Token is a join token: a public id and a secret of 160 random bits. It prints
// as its id alone; only [Token.Text] gives the secret away.
type Token struct {
	ID     string
	secret string
}

// Generate makes a new token.
func Generate() Token {
	var id [8]byte
	var secret [20]byte
	rand.Read(id[:])
	rand.Read(secret[:])
	return Token{ID: alphabet.EncodeToString(id[:])[:idLength], secret: alphabet.EncodeToString(secret[:])}
}

// Parse reads a token's text, "bcjt_<id>_<secret>_<crc32>", strictly: no space,
// no capitals, nothing before or after it, the checksum right.
func Parse(text string) (Token, error) {
	if len(text) != tokenLength {
		return Token{}, ErrMalformed
	}
	parts := strings.Split(text, "_")
	if len(parts) != 4 || parts[0] != tokenPrefix || len(parts[1]) != idLength || len(parts[2]) != secretLength {
		return Token{}, ErrMalformed
	}
	if !inAlphabet(parts[1]) || !inAlphabet(parts[2]) || parts[3] != checksum(text[:len(text)-sumLength-1]) {
		return Token{}, ErrMalformed
	}
	return Token{ID: parts[1], secret: parts[2]}, nil
}

// Text is the token as a machine is given it. The checksum, CRC-32 (IEEE) over
// what stands before the last underscore, lets secret scanners find leaks.
func (t Token) Text() string {
	body := tokenPrefix + "_" + t.ID + "_" + t.secret
	return body + "_" + checksum(body)
}

// SecretSHA256 is what the database keeps: SHA-256 over "bcjt/v1" NUL namespace
// NUL id NUL secret, so that a hash copied into another tenant opens nothing.
func (t Token) SecretSHA256(namespace string) [32]byte {
	return sha256.Sum256([]byte("bcjt/v1\x00" + namespace + "\x00" + t.ID + "\x00" + t.secret))
}

// String is the token's id: safe to log.
func (t Token) String() string { return tokenPrefix + "_" + t.ID + "_…" }

// GoString keeps the secret out of %#v too.
func (t Token) GoString() string { return fmt.Sprintf("jointoken.Token{%s}", t) }

func checksum(s string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(s))) }

func inAlphabet(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '2' || c > '7') {
			return false
		}
	}
	return true
}
