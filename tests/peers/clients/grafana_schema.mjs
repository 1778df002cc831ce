// Checks a dashboard against the types that Grafana publishes (@grafana/schema): standard input is JSON, the output a
// line for each thing that does not fit. Panels are checked with the options of their kind, too.
import { readFileSync, rmSync, writeFileSync, mkdtempSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const folder = process.argv[2];
const require = createRequire(join(folder, "package.json"));
const { createGenerator } = require("ts-json-schema-generator");
const Ajv = require("ajv").default;

const raw = join(folder, "node_modules/@grafana/schema/dist/types/raw");
const place = mkdtempSync(join(folder, "types-"));

/** The validator of a type; an unknown field does not fit. */
function validator(file, type) {
  const path = join(place, `${file.replaceAll("/", "-")}-${type}.ts`);
  writeFileSync(path, `export type { ${type} } from '${join(raw, file, "x/types.gen")}';\n`);
  const schema = createGenerator({ path, type, skipTypeCheck: true, additionalProperties: false }).createSchema(type);
  return new Ajv({ strict: false, allErrors: true }).compile(schema);
}

function complaints(check, value, where, counts = () => true) {
  check(value);
  return (check.errors ?? []).filter(counts).map((each) => `${where}${each.instancePath} ${each.message} ${JSON.stringify(each.params)}`);
}

/** A panel's missing options have defaults in Grafana, although its types require them. */
const notMissing = (each) => each.keyword !== "required";
const board = JSON.parse(readFileSync(0, "utf8"));
const found = complaints(validator("dashboard", "Dashboard"), board, "");
for (const kind of new Set(board.panels.map((panel) => panel.type).filter((type) => type !== "row"))) {
  const options = validator(`composable/${kind}/panelcfg`, "Options");
  const fields = kind === "timeseries" ? validator(`composable/${kind}/panelcfg`, "FieldConfig") : null;
  board.panels.forEach((panel, at) => {
    if (panel.type !== kind) return;
    found.push(...complaints(options, panel.options ?? {}, `/panels/${at}/options`, notMissing));
    if (fields) found.push(...complaints(fields, panel.fieldConfig?.defaults?.custom ?? {}, `/panels/${at}/fieldConfig/defaults/custom`, notMissing));
  });
}
rmSync(place, { recursive: true });
for (const line of found) console.log(line);
