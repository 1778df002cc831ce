// The page's own words. Both languages have the same names.

export const TEXTS = {
  en: {
    addImage: "Add image", answering: "Answering…", apiKey: "API key", apiKeyHelp: "Kept in this tab only, until you close it.",
    arguments: "Arguments", assistant: "Assistant", branch: "Version {n} of {all}", cancel: "Cancel", chats: "Conversations",
    clear: "Delete all conversations", clearAsk: "Delete all conversations in this browser? This cannot be undone.",
    close: "Close", code: "Code", connecting: "Connecting to the server…", contextLength: "{n} tokens of context",
    copied: "Copied", copy: "Copy", dark: "Dark", data: "Conversations", default: "default", delete: "Delete",
    deleteAsk: "Delete the conversation “{title}”?", down: "Go to the end", earlier: "Earlier",
    edit: "Edit", editHelp: "Sending makes a new version; the old one is kept.", error: "Error", export: "Export",
    exported: "Conversations were saved to a file.", finished: "The answer is complete.",
    frequency_penalty: "Frequency penalty", fullConversation: "This conversation is full. Begin a new one.",
    greeting: "What can I help with?", imageTooMany: "At most {n} images go into a message.",
    imageWrong: "“{name}” cannot be read as an image.", import: "Import", imported: "{n} conversations were added.",
    importWrong: "This is not a file of conversations: {why}", keyNeeded: "This server asks for an API key.",
    keySave: "Continue", keyWrong: "The server does not know this key.", language: "Language", lengthReached:
    "The answer reached its length limit.", light: "Light", local: "Conversations stay in this browser.", max_tokens: "Most tokens",
    menu: "Show or hide the conversations", message: "Message", messageHint: "Write a message…", min_p: "Min p", model: "Model",
    network: "The server does not answer. Is it running?", newChat: "New conversation", newer: "Next version", noChats: "No conversations yet",
    notCopied: "Not copied", notKept: "This browser keeps no data here: conversations last until you close the page.",
    number: "Not in its range: {min} to {max}", off: "Off", older: "Previous version", on: "On", presence_penalty: "Presence penalty",
    reasoning: "Reasoning", reasoningNow: "Thinking…", regenerate: "Answer again", removeImage: "Remove image",
    rename: "Rename", renameAsk: "Title of the conversation", repetition_penalty: "Repetition penalty", reset: "Reset to defaults",
    result: "Result of {name}", sampling: "Sampling", save: "Save", search: "Search conversations", seconds: "{n} s", seed: "Seed", send: "Send",
    sendResults: "Send results", settings: "Settings", shortcuts: "Keyboard shortcuts", skip: "Go to the message field",
    keyEdit: "Edit the last message (in an empty field)", keyHelp: "Show this list", keyLine: "New line", keyMenu: "Show or hide the conversations",
    keyNew: "New conversation", keyNewline: "Send", keySettings: "Settings", keyFocus: "Go to the message field",
    keyStop: "Stop the answer", speed: "{n} tokens/s", stop: "Stop", stopped: "Stopped", system: "Instructions", systemHelp: "Sent before every conversation.",
    table: "Table", temperature: "Temperature", theme: "Colours", thinking: "Reasoning", thinkingHelp: "For models whose template has this switch.",
    today: "Today", tokens: "{n} tokens", tool: "Tool", toolCall: "Calls {name}", tools: "Tools", toolsHelp: "A JSON list of functions, as in the OpenAI API. You give their results.",
    toolsWrong: "Not a JSON list of functions", top_k: "Top k", top_p: "Top p", untitled: "Untitled", yesterday: "Yesterday", you: "You", auto: "As the system", answerEmpty: "The answer is empty.",
    statusArchitecture: "Architecture", statusAsleep: "The weights are released: it sleeps.", statusBackend: "Backend", statusContext: "Context",
    statusDevice: "Device", statusEnded: "Ended", statusGenerated: "Generated tokens", statusHits: "Found in the prefix cache",
    statusKv: "KV cache", statusNotReady: "Not ready: {why}", statusOf: "{n} of {all}", statusPreemptions: "Preempted", statusPrompt: "Prompt tokens",
    statusRanks: "Processes", statusReady: "Ready", statusRequests: "Requests", statusRunning: "Running", statusUptime: "Runs since",
    statusUsed: "Blocks in use", statusVersions: "Versions", statusWaiting: "Waiting", statusWeights: "Version of the weights",
    statusWhy: "Chosen because", statusAdapters: "Adapters (LoRA)", statusTitle: "Status", statusTokens: "Tokens", statusDtype: "Numbers",
  },
  zh: {
    addImage: "添加图片", answering: "正在回答…", apiKey: "API 密钥", apiKeyHelp: "仅保存在此标签页中，关闭后即清除。",
    arguments: "参数", assistant: "助手", branch: "第 {n} 版，共 {all} 版", cancel: "取消", chats: "对话",
    clear: "删除全部对话", clearAsk: "删除此浏览器中的全部对话？此操作无法撤销。",
    close: "关闭", code: "代码", connecting: "正在连接服务器…", contextLength: "上下文 {n} 个词元",
    copied: "已复制", copy: "复制", dark: "深色", data: "对话", default: "默认", delete: "删除",
    deleteAsk: "删除对话“{title}”？", down: "跳到末尾", earlier: "更早",
    edit: "编辑", editHelp: "发送后生成新版本，旧版本会保留。", error: "错误", export: "导出",
    exported: "对话已保存为文件。", finished: "回答已完成。",
    frequency_penalty: "频率惩罚", fullConversation: "此对话已满，请新建对话。",
    greeting: "有什么可以帮您？", imageTooMany: "每条消息最多 {n} 张图片。",
    imageWrong: "无法将“{name}”作为图片读取。", import: "导入", imported: "已添加 {n} 个对话。",
    importWrong: "这不是对话文件：{why}", keyNeeded: "此服务器需要 API 密钥。",
    keySave: "继续", keyWrong: "服务器不认识此密钥。", language: "语言", lengthReached:
    "回答已达到长度上限。", light: "浅色", local: "对话仅保存在此浏览器中。", max_tokens: "最多词元",
    menu: "显示或隐藏对话列表", message: "消息", messageHint: "输入消息…", min_p: "Min p", model: "模型",
    network: "服务器没有响应，它在运行吗？", newChat: "新建对话", newer: "下一版本", noChats: "还没有对话",
    notCopied: "未能复制", notKept: "此浏览器不保存数据：关闭页面后对话即消失。",
    number: "超出范围：{min} 至 {max}", off: "关闭", older: "上一版本", on: "开启", presence_penalty: "存在惩罚",
    reasoning: "思考过程", reasoningNow: "思考中…", regenerate: "重新回答", removeImage: "移除图片",
    rename: "重命名", renameAsk: "对话标题", repetition_penalty: "重复惩罚", reset: "恢复默认",
    result: "{name} 的结果", sampling: "采样", save: "保存", search: "搜索对话", seconds: "{n} 秒", seed: "随机种子", send: "发送",
    sendResults: "发送结果", settings: "设置", shortcuts: "键盘快捷键", skip: "跳到输入框",
    keyEdit: "编辑上一条消息（输入框为空时）", keyHelp: "显示此列表", keyLine: "换行", keyMenu: "显示或隐藏对话列表",
    keyNew: "新建对话", keyNewline: "发送", keySettings: "设置", keyFocus: "跳到输入框",
    keyStop: "停止回答", speed: "{n} 词元/秒", stop: "停止", stopped: "已停止", system: "指令", systemHelp: "在每次对话之前发送。",
    table: "表格", temperature: "温度", theme: "配色", thinking: "思考", thinkingHelp: "适用于模板带有此开关的模型。",
    today: "今天", tokens: "{n} 个词元", tool: "工具", toolCall: "调用 {name}", tools: "工具", toolsHelp: "与 OpenAI API 相同的 JSON 函数列表，结果由您填写。",
    toolsWrong: "不是 JSON 函数列表", top_k: "Top k", top_p: "Top p", untitled: "未命名", yesterday: "昨天", you: "您", auto: "跟随系统", answerEmpty: "回答为空。",
    statusArchitecture: "架构", statusAsleep: "权重已释放：处于休眠。", statusBackend: "后端", statusContext: "上下文",
    statusDevice: "设备", statusEnded: "已结束", statusGenerated: "生成的词元", statusHits: "前缀缓存命中",
    statusKv: "KV 缓存", statusNotReady: "未就绪：{why}", statusOf: "{n} / {all}", statusPreemptions: "被抢占", statusPrompt: "提示词元",
    statusRanks: "进程", statusReady: "就绪", statusRequests: "请求", statusRunning: "运行中", statusUptime: "启动于",
    statusUsed: "使用中的块", statusVersions: "版本", statusWaiting: "等待中", statusWeights: "权重版本",
    statusWhy: "选择原因", statusAdapters: "适配器（LoRA）", statusTitle: "状态", statusTokens: "词元", statusDtype: "数值类型",
  },
};

/** The language to begin with: what was chosen, else the browser's. */
export function languageOf(chosen, preferred) {
  if (chosen in TEXTS) return chosen;
  return preferred.map((each) => each.slice(0, 2).toLowerCase()).find((each) => each in TEXTS) ?? "en";
}

/** A translator for one language: `t("tokens", {n: 3})`. */
export function translator(language) {
  return (name, values = {}) => {
    const text = TEXTS[language][name];
    if (text === undefined) throw new Error(`no text is called ${name}`);
    return text.replace(/{(\w+)}/g, (_, value) => values[value]);
  };
}

/** Fills `data-text`, `data-label` (name and tooltip) and `data-hint` (placeholder) of all elements in `root`. */
export function translate(root, t) {
  for (const each of root.querySelectorAll("[data-text]")) each.textContent = t(each.dataset.text);
  for (const each of root.querySelectorAll("[data-hint]")) each.placeholder = t(each.dataset.hint);
  for (const each of root.querySelectorAll("[data-label]")) {
    const label = t(each.dataset.label);
    each.setAttribute("aria-label", label);
    if (each.matches("button, label")) each.title = label;
  }
}
