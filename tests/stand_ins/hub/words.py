"""Words for the stand-in tokenizer: regular verbs; the forms of the first 251 are the ids 1000 to 2000."""

from __future__ import annotations

VERBS = """
accept account act add address align allow alter anchor appear appoint ask assert assess assist attach attempt attend
await blend block board bolt brush call center chart check claim clean clear climb clock coach coast coat comment
compact complain conduct connect consent consider consist construct contact contain contest contract cook cool correct
count craft defend deliver depend deploy detect develop discuss display dress drill echo edit embed end enjoy enter
exceed expand expect explain export extend extract field fill filter finish fish flash flood flow focus fold follow
forward fuel gain glow grant grasp greet ground grow guard guess hand harden head heat help highlight hoist hook hunt
impact import inform insert insist inspect intend interest invent jump kick land laugh launch lengthen lift limit link
listen load lock long look mark match matter mend mourn narrow need object offer open orbit order own park pass
pattern perform plant play point poll pool pour power predict present prevent print proceed process profit project
prompt protect pull push quest question rain record recover reflect reform refresh remain remark render repair reply
report request respect rest result retain return reveal reward roll roof round search seem select shift shout sign
signal slow smooth soften sort spark spill stack staff start steam steer stem stream stretch support survey sustain
talk tend test thank thread toast touch tour track train transfer transform transport travel turn visit wait walk warm
warn wash watch water whisper widen winter wonder work yearn yield absorb adopt alarm annoy avoid bless blink boast
brighten broaden bump bypass cancel cement cluster conform confront convey cough crunch curl decay deepen descend
destroy distort embody encounter enlighten erect exhaust exhibit expound float flower frighten harvest hinder honor
hover index infect inflict inhabit intercept iron itch lower loosen market moan monitor murmur neglect obstruct
overload pilot pinpoint ponder pray preview proclaim quicken redeem reload restart rework sail sharpen shorten sketch
solicit spray sprout squeal strain strand subtract summon suspend sway sweeten thicken threaten toughen toss trust
twist uncover unfold unload unlock upload utter vanish volunteer wager weaken whiten witness worsen
""".split()  # noqa: SIM905  (a list of lines would hide the words)
