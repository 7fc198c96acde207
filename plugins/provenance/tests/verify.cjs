// Verify a statement as `cosign verify-blob-attestation --key` does, by sigstore's own library: node verify.cjs BUNDLE KEY FILE TYPE
const { createHash } = require("crypto");
const { readFileSync } = require("fs");
const { bundleFromJSON } = require("@sigstore/bundle");
const { toSignedEntity, toTrustMaterial, Verifier } = require("@sigstore/verify");

const [bundleFile, keyFile, file, type] = process.argv.slice(2);
const bundle = bundleFromJSON(JSON.parse(readFileSync(bundleFile)));
const nobody = { certificateAuthorities: [], timestampAuthorities: [], tlogs: [], ctlogs: [] };
const pem = readFileSync(keyFile, "utf8");
const der = Buffer.from(pem.replace(/-----[^-]+-----|\s/g, ""), "base64");
const hint = bundle.verificationMaterial.content.publicKey.hint; // cosign takes the key it is given
const trust = toTrustMaterial(nobody, { [hint]: { rawBytes: der } });
new Verifier(trust, { tlogThreshold: 0, ctlogThreshold: 0, timestampThreshold: 0 }).verify(toSignedEntity(bundle));
const statement = JSON.parse(bundle.content.dsseEnvelope.payload.toString());
const digest = createHash("sha256").update(readFileSync(file)).digest("hex");
if (statement.predicateType !== type) throw new Error(`predicate type ${statement.predicateType}`);
if (!statement.subject.some((each) => each.digest.sha256 === digest)) throw new Error(`no subject is ${digest}`);
