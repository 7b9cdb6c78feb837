// Forms from JSON schemas. Part of the script of the console: see console.js.

const FIELDS_MAX = 500; // Fields of one form from which on an object is JSON text.
const STEPS_MAX = 20; // References in a row.

const isRounded = (value) => !Number.isFinite(value) || (Number.isInteger(value) && !Number.isSafeInteger(value));

/** Parses JSON. A number that JavaScript would round keeps its text, if the browser supports that. */
function parseExact(text) {
  if (!JSON.rawJSON) return JSON.parse(text);
  const keep = (_, value, { source }) => (typeof value === "number" && isRounded(value) ? JSON.rawJSON(source) : value);
  return JSON.parse(text, keep);
}

/** Returns the number in a field. */
function readNumber(text, name) {
  const value = Number(text);
  if (!isRounded(value)) return value;
  if (JSON.rawJSON) return parseExact(text);
  throw new Error(`${name}: this browser would round ${text}; call the tool with \`satellite call\``);
}

/** Returns the part of a schema to which a local reference points. */
function referenced(root, reference) {
  try {
    const keys = decodeURIComponent(reference).split("/").slice(1);
    return keys.reduce((part, key) => part?.[key.replaceAll("~1", "/").replaceAll("~0", "~")], root);
  } catch {
    return undefined; // The reference is not valid.
  }
}

/**
 * Returns a schema with its reference resolved, and without an alternative that is `null`. Schemas may contain
 * themselves: alternatives of alternatives are left out.
 */
function resolved(schema, root, isAlternative = false) {
  let nullable = false;
  for (let step = 0; step < STEPS_MAX; step++) {
    const { $ref, allOf, anyOf, oneOf, ...rest } = schema ?? {};
    const alternatives = anyOf ?? oneOf;
    if (typeof $ref === "string") {
      schema = { ...referenced(root, $ref), ...rest };
    } else if (allOf?.length === 1) {
      schema = { ...allOf[0], ...rest };
    } else if (Array.isArray(alternatives)) {
      const left = alternatives.filter((one) => one?.type !== "null" && one?.const !== null);
      nullable ||= left.length < alternatives.length;
      if (left.length !== 1) {
        return { ...rest, alternatives: isAlternative ? [] : left.map((one) => resolved(one, root, true)), nullable };
      }
      schema = { ...left[0], ...rest };
    } else {
      break;
    }
  }
  return { ...schema, alternatives: undefined, nullable: nullable || [schema?.type].flat().includes("null") };
}

/** Returns [value, label] of each value of a schema that lists its values. */
function choices({ enum: values, enumNames, alternatives, ...schema }) {
  if (Array.isArray(values)) return values.map((value, nth) => [value, enumNames?.[nth]]);
  if ("const" in schema) return [[schema.const, schema.title]];
  const all = alternatives?.map((one) => (one.alternatives ? undefined : choices(one)));
  return all?.length && all.every(Boolean) ? all.flat() : undefined;
}

/** Returns the types that a schema permits, without `null`; undefined if it permits all. */
function typesOf({ type, alternatives, properties, items }) {
  if (type !== undefined) return [type].flat().filter((type) => type !== "null");
  if (properties) return ["object"];
  if (items) return ["array"];
  const all = alternatives?.map((one) => (one.alternatives ? undefined : typesOf(one)));
  return all?.length && all.every(Boolean) ? all.flat() : undefined;
}

/** Reads a field that takes values of several types: JSON, or else text if the schema permits text. */
function readAny(text, types, name) {
  const permits = (...some) => !types || some.some((type) => types.includes(type));
  let value;
  try {
    value = parseExact(text);
  } catch (error) {
    if (permits("string")) return text;
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
  if (!permits("string")) return value;
  const isNumber = typeof value === "number" || JSON.isRawJSON?.(value);
  const type = value === null ? "null" : Array.isArray(value) ? "array" : isNumber ? "number" : typeof value;
  return permits(type, type === "number" && "integer") ? value : text;
}

/** Adds the fields of an object's schema to an element. Returns a function that reads their values. */
function schemaForm(place, schema, form = { root: schema, fields: 0 }) {
  const { properties, required } = resolved(schema, form.root);
  const needed = new Set([required ?? []].flat());
  const readers = Object.entries(properties ?? {}).map(([name, property]) =>
    [name, schemaField(place, name, resolved(property, form.root), needed.has(name), form)]);
  if (!readers.length) place.append(element("p", { class: "help" }, "No arguments."));
  return () => Object.fromEntries(readers.map(([name, read]) => [name, read()]).filter(([, value]) => value !== undefined));
}

/** Adds the field of a property. Returns a function that reads its value; an absent one is undefined. */
function schemaField(place, name, schema, needed, form) {
  const types = typesOf(schema);
  const type = types?.length === 1 ? types[0] : undefined;
  form.fields += 1;
  if (type === "object" && Object.keys(schema.properties ?? {}).length && form.fields < FIELDS_MAX) {
    return objectField(place, name, schema, needed, form);
  }
  const { field, read } = valueField(name, schema, type, types, needed, form.root);
  place.append(element("label", {}, ...fieldTitle(name, schema, needed), field, fieldHelp(schema)));
  const absent = needed && schema.nullable ? null : undefined;
  return () => read() ?? absent;
}

const fieldTitle = (name, schema, needed) => [element("span", {}, shown(schema.title ?? name), needed ? " (required)" : "")];
const fieldHelp = (schema) => element("span", { class: "help" }, shown(schema.description ?? ""));

/** Adds a group of fields. An optional object has none until its box is checked. */
function objectField(place, name, schema, needed, form) {
  const fields = element("div", { class: "fields" });
  const box = element("input", { type: "checkbox" });
  const title = fieldTitle(name, schema, needed);
  const legend = element("legend", {}, ...(needed ? title : [element("label", {}, box, ...title)]));
  place.append(element("fieldset", {}, legend, fieldHelp(schema), fields));
  let read;
  const show = () => {
    fields.replaceChildren();
    read = needed || box.checked ? schemaForm(fields, schema, form) : undefined;
  };
  box.addEventListener("change", show);
  show();
  return () => read?.();
}

/** Returns the field of a value, and a function that reads it. */
function valueField(name, schema, type, types, needed, root) {
  const isRequired = needed && !schema.nullable;
  const listed = choices(schema);
  const items = type === "array" && !Array.isArray(schema.items) ? choices(resolved(schema.items, root)) : undefined;
  const option = ([value, label], nth) => element("option", { value: nth }, shown(label ?? value));
  const initial = schema.default;
  let field, read;
  if (listed) {
    field = element("select", {}, ...(isRequired ? [] : [element("option", { value: "" }, "–")]), ...listed.map(option));
    read = () => (field.value === "" ? undefined : listed[field.value][0]);
    const selected = listed.findIndex(([value]) => value === initial);
    if (selected >= 0) field.value = selected;
  } else if (items) {
    field = element("select", { multiple: true, size: Math.min(items.length, 8), required: isRequired && schema.minItems > 0 }, ...items.map(option));
    for (const [nth, [value]] of items.entries()) field.options[nth].selected = Array.isArray(initial) && initial.includes(value);
    read = () => {
      const values = [...field.selectedOptions].map((option) => items[option.value][0]);
      return values.length || isRequired ? values : undefined;
    };
  } else if (type === "boolean") {
    field = element("select", {}, element("option", { value: "" }, "–"), element("option", { value: "true" }, "true"), element("option", { value: "false" }, "false"));
    read = () => (field.value === "" ? undefined : field.value === "true");
    if (isRequired || typeof initial === "boolean") field.value = String(initial ?? false);
  } else if (type === "number" || type === "integer") {
    field = numberField(schema, type, isRequired);
    read = () => (field.value === "" ? undefined : readNumber(field.value, name));
    if (initial !== undefined) field.value = initial;
  } else if (type === "string") {
    const isLong = (schema.maxLength ?? 0) > 200 || /content|text|body|code|query|prompt/i.test(name);
    // An empty text is a text.
    const required = isRequired && schema.minLength > 0;
    field = isLong ? element("textarea", { required }) : element("input", { type: "text", required });
    read = () => (field.value === "" && !isRequired ? undefined : field.value);
    if (typeof initial === "string") field.value = initial;
  } else {
    const isText = !types || types.includes("string");
    const hint = { array: "[…]", object: "{…}" }[type] ?? (isText ? "JSON; anything else is text" : "JSON");
    field = element("textarea", { required: isRequired && !isText, placeholder: hint });
    read = () => (field.value.trim() === "" ? (isRequired && isText ? "" : undefined) : readAny(field.value, types, name));
    if (initial !== undefined && initial !== null) field.value = JSON.stringify(initial);
  }
  return { field, read };
}

function numberField({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }, type, required) {
  const isWhole = type === "integer";
  // The steps of a field of whole numbers begin at its minimum.
  const min = isWhole && minimum !== undefined ? Math.ceil(minimum) : minimum;
  const field = element("input", { type: "number", step: isWhole ? 1 : "any", min, max: maximum, required });
  // Older schemas have `true` beside the limit.
  const above = exclusiveMinimum === true ? minimum : exclusiveMinimum;
  const below = exclusiveMaximum === true ? maximum : exclusiveMaximum;
  const check = () => {
    const isLow = typeof above === "number" && field.value !== "" && Number(field.value) <= above;
    const isHigh = typeof below === "number" && field.value !== "" && Number(field.value) >= below;
    field.setCustomValidity(isLow ? `The number must be greater than ${above}.` : isHigh ? `The number must be less than ${below}.` : "");
  };
  field.addEventListener("input", check);
  return field;
}
