package wire

// MaxRotations is the most links that one answer carries; a machine asks again
// after the last one until an answer is empty.
const MaxRotations = 32

// Rotations is the answer to GET /v1/bundle/rotations?after=<generation>: the
// signed bundles that follow that generation, in order and without a gap. Each
// is a compact JWS with typ [TypeBundle] whose payload is a whole [Bundle],
// signed by one of the bundle keys of the generation before it.
type Rotations struct {
	Protocol  int      `json:"protocol"`
	Rotations []string `json:"rotations"`
}
